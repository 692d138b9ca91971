"""The commands of `millstream fleet` that ask the admin service for machines, and order some."""

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from millstream.admin.admin_client import JsonBody, admin_client
from millstream.admin.console_output import make_console, print_json_lines
from millstream.admin.fitted_table import Column, FittedTable
from millstream.fleet.machine_settings import (
    FleetPauseSettings,
    FleetResumeSettings,
    FleetSetSettings,
    MachinesSettings,
    TypesSettings,
)

_TYPE_COLUMNS = (
    Column("type", "name", least=8),
    Column("price/h", is_number=True),
    Column("currency"),
    Column("boot s", is_number=True),
    Column("stock", is_number=True),
    Column("quota", is_number=True),
    Column("spot"),
    Column("machines", is_number=True),
)
_MACHINE_COLUMNS = (
    Column("id", "name", least=10),
    Column("type"),
    Column("model"),
    Column("state"),
    Column("since"),
    Column("crashes", is_number=True),
    Column("until"),
    Column("reason", "text"),
)


async def list_types(settings: TypesSettings, stop: asyncio.Event) -> None:
    """Print the machine types of the table `[fleet]`; raises as `AdminClient.call`."""
    await _list(settings, "types", _TYPE_COLUMNS, _type_cells)


async def list_machines(settings: MachinesSettings, stop: asyncio.Event) -> None:
    """Print the machines that are wanted or there; raises as `AdminClient.call`."""
    await _list(settings, "machines", _MACHINE_COLUMNS, _machine_cells)


async def set_machines(settings: FleetSetSettings, stop: asyncio.Event) -> None:
    """Have so many machines of a type for a model for a time, and print what was ordered.

    Raises as `AdminClient.call`: also if there is no such type or model.
    """
    async with admin_client(settings) as admin:
        answer = await admin.call(
            "fleet.set",
            name=settings.type,
            model=settings.model,
            count=settings.count,
            seconds=settings.within,
        )
    if settings.as_json:
        print(json.dumps(answer))
    else:
        until = format_time(answer["expires_at"])
        print(f"{answer['count']} of {answer['type']} for {answer['model']} until {until}")


async def pause(settings: FleetPauseSettings, stop: asyncio.Event) -> None:
    """Have nothing decided for a time; raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        answer = await admin.call("fleet.pause", seconds=settings.within)
    until = format_time(answer["paused_until"])
    print(json.dumps(answer) if settings.as_json else f"nothing is decided until {until}")


async def resume(settings: FleetResumeSettings, stop: asyncio.Event) -> None:
    """End a pause; raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        answer = await admin.call("fleet.pause", seconds=0)
    print(json.dumps(answer) if settings.as_json else "the fleet decides again")


async def _list(
    settings: TypesSettings | MachinesSettings,
    name: str,
    columns: Sequence[Column],
    cells_of: Callable[[JsonBody], list[str]],
) -> None:
    """Print the objects under a name of what the admin service tells of the fleet."""
    async with admin_client(settings) as admin:
        found = (await admin.call("fleet.show"))[name]
    if settings.as_json:
        print_json_lines(found)
    else:
        make_console().print(FittedTable(columns, [cells_of(each) for each in found]))


def _type_cells(kind: JsonBody) -> list[str]:
    names = ("name", "price_per_hour", "currency", "boot_seconds", "stock", "quota")
    facts = ["any" if kind[name] is None else f"{kind[name]}" for name in names]
    return [*facts, "yes" if kind["spot"] else "no", str(kind["machines"])]


def _machine_cells(machine: JsonBody) -> list[str]:
    return [
        *(machine[name] for name in ("id", "type", "model", "state")),
        format_time(machine["created_at"]),
        str(machine["crashes"]),
        format_time(machine["expires_at"]),
        machine["reason"],
    ]


def format_time(seconds: float | None) -> str:
    """Return epoch seconds as a time of UTC; a dash for None."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
