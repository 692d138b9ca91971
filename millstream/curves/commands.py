"""The commands `millstream curves list`, `curves show` and `curves import`."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime

from millstream.admin.admin_client import AdminClient, JsonBody, admin_client, list_all
from millstream.admin.console_output import make_console, make_whole_table, print_json_lines
from millstream.admin.fitted_table import Column, FittedTable
from millstream.curves.curve_file import parse_curves
from millstream.curves.settings import (
    ImportCurvesSettings,
    ListCurvesSettings,
    ShowCurveSettings,
)
from streams.errors import NotFound
from streams.records.fleet.curves import Curve

_COLUMNS = (
    Column("type", "name"),
    Column("model", "name"),
    Column("version", "name", rank=1),
    Column("source"),
    Column("measured"),
    Column("sequences", is_number=True),
    Column("KV tokens", is_number=True),
    Column("step", is_number=True),
    Column("load", is_number=True),
)
_POINT_COLUMNS = (
    Column("batch", is_number=True),
    Column("prompt", is_number=True),
    Column("output", is_number=True),
    Column("first token", is_number=True),
    Column("each token", is_number=True),
    Column("requests/s", is_number=True),
)


async def list_curves(settings: ListCurvesSettings, stop: asyncio.Event) -> None:
    """Print what machines of each type do with each model; raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        found = await list_all(admin, "curves.list")
    if settings.as_json:
        print_json_lines(found)
    else:
        make_console().print(FittedTable(_COLUMNS, [_cells(each) for each in found]))


async def show_curve(settings: ShowCurveSettings, stop: asyncio.Event) -> None:
    """Print one curve with its points; raises `NotFound`, or as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        found = await list_all(admin, "curves.list")
    curve = next((each for each in found if each["name"] == settings.name), None)
    if curve is None:
        there_are = ", ".join(each["name"] for each in found) or "none"
        raise NotFound(f"there is no curve {settings.name!r}; there are: {there_are}")
    if settings.as_json:
        print(json.dumps(curve))
        return
    table = make_whole_table(title=curve["name"])
    for name, value in _facts(curve):
        table.add_row(name, value)
    points = ([_number(value) for value in point.values()] for point in curve["points"])
    console = make_console()
    console.print(table)
    console.print(FittedTable(_POINT_COLUMNS, points, "Measured"))


async def import_curves(settings: ImportCurvesSettings, stop: asyncio.Event) -> None:
    """Store the curves of a file, all of which are read before the first is stored.

    Raises `CurveUnreadable`, OSError for a file that cannot be read, or as `AdminClient.call`.
    """
    with settings.file.open() as lines:
        curves = parse_curves(lines, str(settings.file))
    async with admin_client(settings) as admin:
        stored = [await put_curve(admin, curve) for curve in curves]
    if settings.as_json:
        print_json_lines(stored)
    else:
        for curve in stored:
            print(f"{curve['name']}: stored")


async def put_curve(admin: AdminClient, curve: Curve) -> JsonBody:
    """Store a curve, and return it as it is listed; raises as `AdminClient.call`."""
    facts = {**vars(curve), "times": vars(curve.times), "points": [vars(p) for p in curve.points]}
    return await admin.call("curves.put", name=curve.name, curve=facts)


async def fetch_curves(admin: AdminClient) -> list[Curve]:
    """Return the curves that hold now; raises as `AdminClient.call`."""
    return [Curve.from_map(each) for each in await list_all(admin, "curves.list")]


def _cells(curve: JsonBody) -> list[str]:
    step = curve["times"]["step_seconds"] + curve["times"]["sequence_seconds"]
    return [
        *(curve[name] for name in ("type", "model", "version")),
        _source(curve),
        _time(curve["measured_at"]),
        f"{curve['max_sequences']:,}",
        f"{curve['kv_tokens']:,}",
        f"{1000 * step:.1f} ms",
        _seconds(curve["load_seconds"]),
    ]


def _facts(curve: JsonBody) -> Iterator[tuple[str, str]]:
    """The rows of one curve: names and values."""
    yield "source", _source(curve)
    yield "measured", _time(curve["measured_at"])
    for name, seconds in curve["times"].items():
        yield name.removesuffix("_seconds").replace("_", " "), f"{1000 * seconds:.4g} ms"
    for name in ("max_sequences", "kv_tokens", "weight_bytes", "kv_bytes_per_token"):
        value = curve[name]
        yield name.replace("_", " "), "unknown" if value is None else f"{value:,}"
    yield "load", _seconds(curve["load_seconds"])
    yield "of which warm-up", _seconds(curve["warm_up_seconds"])


def _source(curve: JsonBody) -> str:
    factor = curve["live_factor"]
    return curve["source"] if factor == 1 else f"{curve['source']}, times {factor:.2f}"


def _time(epoch: float) -> str:
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} s"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
