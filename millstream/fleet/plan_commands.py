"""The commands `millstream fleet status`, `fleet plan` and `fleet why`."""

import asyncio
import json

from millstream.admin.admin_client import JsonBody, admin_client
from millstream.admin.console_output import make_console, print_json_lines
from millstream.admin.fitted_table import Column, FittedTable
from millstream.fleet.machine_commands import format_time
from millstream.fleet.machine_settings import FleetPlanSettings, FleetWhySettings, StatusSettings
from streams.errors import ModelNotFound

_MODEL_COLUMNS = (
    Column("model", "name"),
    Column("wanted", is_number=True),
    Column("least", is_number=True),
    Column("most", is_number=True),
    Column("cold start", is_number=True),
    Column("why", "text"),
)
_CHANGE_COLUMNS = (
    Column("at"),
    Column("what"),
    Column("machine", "name", least=10),
    Column("type"),
    Column("model"),
    Column("reason", "text"),
)


async def show_status(settings: StatusSettings, stop: asyncio.Event) -> None:
    """Print what is wanted for each model, and all that is known; raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        fleet = await admin.call("fleet.show")
    if settings.as_json:
        print(json.dumps(fleet))
        return
    if fleet["paused_until"]:
        print(f"paused: nothing is decided until {format_time(fleet['paused_until'])}")
    print(f"{len(fleet['machines'])} machines of {len(fleet['types'])} types")
    make_console().print(FittedTable(_MODEL_COLUMNS, map(_model_cells, fleet["models"])))


async def show_plan(settings: FleetPlanSettings, stop: asyncio.Event) -> None:
    """Print the last changes of the plan, the newest first; raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        changes = (await admin.call("fleet.show"))["changes"]
    if settings.as_json:
        print_json_lines(changes)
    else:
        make_console().print(FittedTable(_CHANGE_COLUMNS, map(_change_cells, changes)))


async def explain_model(settings: FleetWhySettings, stop: asyncio.Event) -> None:
    """Print why a model has the machines that it has, and the changes that led there.

    Raises as `AdminClient.call`, and `ModelNotFound`.
    """
    async with admin_client(settings) as admin:
        fleet = await admin.call("fleet.show")
    found = next((each for each in fleet["models"] if each["model"] == settings.model), None)
    if found is None:
        raise ModelNotFound(settings.model)
    machines, changes = (
        [each for each in fleet[name] if each["model"] == settings.model]
        for name in ("machines", "changes")
    )
    if settings.as_json:
        print(json.dumps({**found, "machines": machines, "changes": changes}))
        return
    print(f"{settings.model}: {found['wanted']} machines wanted. {found['reason'] or ''}")
    for machine in machines:
        print(f"  {machine['id']} ({machine['type']}, {machine['state']}): {machine['reason']}")
    make_console().print(FittedTable(_CHANGE_COLUMNS, map(_change_cells, changes)))


def _model_cells(model: JsonBody) -> list[str]:
    cold_start = model["cold_start"]
    numbers = (model[name] for name in ("wanted", "min_workers", "max_workers"))
    return [
        model["model"],
        *map(str, numbers),
        f"{cold_start['seconds']:.1f} s" if cold_start else "-",
        model["reason"] or "-",
    ]


def _change_cells(change: JsonBody) -> list[str]:
    names = ("action", "machine", "type", "model", "reason")
    return [format_time(change["at"]), *(change[name] for name in names)]
