"""The commands `millstream models serve`, `unserve` and `served`: which workers serve what."""

import asyncio
import json

from millstream.admin.admin_client import JsonBody, admin_client, list_all
from millstream.admin.console_output import make_console, make_whole_table, print_json_lines
from millstream.models.settings import ListSettings, ServeSettings


async def serve(settings: ServeSettings, stop: asyncio.Event) -> None:
    """Have a model served by a worker or by all workers of a type; raises as `AdminClient.call`."""
    await _change(settings, "served.add")


async def unserve(settings: ServeSettings, stop: asyncio.Event) -> None:
    """Have a model served there no longer; raises as `AdminClient.call`.

    Each of the workers drains that model alone, and frees its memory.
    """
    await _change(settings, "served.remove")


async def list_served(settings: ListSettings, stop: asyncio.Event) -> None:
    """Print which models workers have to serve, and how far each is; raises as `AdminClient.call`.

    With JSON an object in each line.
    """
    async with admin_client(settings) as admin:
        served = await list_all(admin, "served.list", by="on")
    if settings.as_json:
        print_json_lines(served)
        return
    table = make_whole_table("on", "serves", "worker", "model", "state")
    for record in served:
        names = ", ".join(record["models"])
        for row in _worker_rows(record["workers"]) or [("none", "", "")]:
            table.add_row(record["on"], names, *row)
    make_console().print(table)


def _worker_rows(workers: list[JsonBody]) -> list[tuple[str, str, str]]:
    states = [
        (worker["worker"], model, state)
        for worker in workers
        for model, state in {**worker["models"], **worker["not_loaded"]}.items()
    ]
    return sorted(states)


async def _change(settings: ServeSettings, operation: str) -> None:
    async with admin_client(settings) as admin:
        record = await admin.call(operation, name=settings.on, model=settings.model)
    if settings.as_json:
        print(json.dumps(record))
    else:
        print(f"{record['on']}: {', '.join(record['models']) or 'none by record'}")
