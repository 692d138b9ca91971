"""The commands `millstream models history` and `millstream models diff`."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from millstream.admin.admin_client import AdminClient, JsonBody, admin_client
from millstream.admin.console_output import make_console, make_whole_table, print_json_lines
from millstream.audit.record_text import render_change
from millstream.models.settings import DiffSettings, HistorySettings
from registry.models import FILE_FACTS
from streams.errors import ModelNotFound

_SHOWN = 60  # characters of a value in the table
_FIELDS = (*FILE_FACTS, "options", "digest", "directory")


async def show_history(settings: HistorySettings, stop: asyncio.Event) -> None:
    """Print the changes of a model or alias that were made, in order.

    They are those that the audit log still has. Raises `ModelNotFound` if there is none of that
    name, and as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        found = [
            each
            for kind in ("model", "alias")
            async for each in _read_changes(admin, f"{kind} {settings.name}")
        ]
    if not found:
        raise ModelNotFound(settings.name)
    found.sort(key=lambda change: change["at"])
    if settings.as_json:
        print_json_lines(found)
        return
    table = make_whole_table("when", "who", "change", "why")
    for change in found:
        at = datetime.fromtimestamp(change["at"] / 1000, UTC)
        told = "; ".join(change["changes"])
        table.add_row(f"{at:%Y-%m-%d %H:%M:%S}Z", change["who"], told, change["why"])
    make_console().print(table)


async def _read_changes(admin: AdminClient, target: str) -> AsyncIterator[JsonBody]:
    """Yield the changes of a record that were made: who, when, what and why."""
    intended: dict[str, JsonBody] = {}
    after, has_more = 0, True
    while has_more:
        page = await admin.call("audit.list", what=target, after=after)
        for record in page["data"]:
            if record["event"] == "intended":
                intended[record["change"]] = record
            elif record["event"] == "done" and (made := intended.pop(record["change"], None)):
                yield {
                    "at": record["at"],
                    "who": record["who"],
                    "target": target,
                    "changes": list(describe_change(made["before"], made["after"])),
                    "why": made["reason"],
                }
        after, has_more = page["last"], page["has_more"]


def describe_change(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield what a change has made of the record of a model or an alias, in words. Pure."""
    old, new = before or {}, after or {}
    known, wanted = old.get("versions", {}), new.get("versions", {})
    yield from (f"version {name} added" for name in wanted if name not in known)
    if after is not None:
        yield from (f"version {name} removed" for name in known if name not in wanted)
    hidden = {"versions", "earlier", "created", *FILE_FACTS}
    plain = [
        None if record is None else {k: v for k, v in record.items() if k not in hidden}
        for record in (before, after)
    ]
    if plain[0] != plain[1]:
        yield render_change(*plain)


async def diff(settings: DiffSettings, stop: asyncio.Event) -> None:
    """Print the fields and files in which two versions differ.

    Raises as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        names = (settings.old, settings.new)
        old, new = [await _read_version(admin, name) for name in names]
    found = compare_versions(old, new)
    if settings.as_json:
        print_json_lines([found])
        return
    table = make_whole_table("", settings.old, settings.new)
    for name, (before, now) in found["fields"].items():
        table.add_row(name, _shorten(before), _shorten(now))
    for path, (before, now) in found["files"].items():
        table.add_row(path, _shorten(before), _shorten(now))
    console = make_console()
    console.print(table if table.row_count else "They are the same.")


async def _read_version(admin: AdminClient, name: str) -> JsonBody:
    found = await admin.call("models.show", name=name)
    version: JsonBody = found["model"]["versions"][found["version"]]
    return version


def compare_versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> JsonBody:
    """Return the `fields` and `files` that differ, each with both values; None: not there. Pure.

    The values of files are their SHA-256.
    """
    fields = {name: [old.get(name), new.get(name)] for name in _FIELDS}
    paths = sorted({*old["files"], *new["files"]})
    files = {path: [old["files"].get(path), new["files"].get(path)] for path in paths}
    return {
        "fields": {name: pair for name, pair in fields.items() if pair[0] != pair[1]},
        "files": {path: pair for path, pair in files.items() if pair[0] != pair[1]},
    }


def _shorten(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"
