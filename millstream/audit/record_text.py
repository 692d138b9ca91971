"""A record of the audit log as one line for people. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_MISSING = "-"


def render_record(record: Mapping[str, Any]) -> str:
    """Return when, who from where, which operation on what, and what became of it."""
    at = datetime.fromtimestamp(record["at"] / 1000, UTC)
    origin = f"{record['who']}@{record['address']}" if record["address"] else record["who"]
    told = f"{at:%Y-%m-%d %H:%M:%S}Z {origin} {record['operation']} {record['target']}"
    return f"{told}: {_render_event(record)}"


def _render_event(record: Mapping[str, Any]) -> str:
    if record["event"] == "intended":
        change = render_change(record["before"], record["after"])
        why = f", because: {record['reason']}" if record["reason"] else ""
        return f"{change}{why} (change {record['change']})"
    reason = f", {record['reason']}" if record["reason"] else ""
    untold = f", and {record['untold']} times before" if record["untold"] else ""
    return f"{record['event']}{reason}{untold} (change {record['change']})"


def render_change(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """Return the fields that differ; a field that is not there has its default."""
    if after is None:
        return "removed"
    old = before or {}
    names = [name for name in {**old, **after} if old.get(name) != after.get(name)]
    if before is None:
        return "new " + ", ".join(f"{name}={after[name]}" for name in names)
    changes = (f"{n} {old.get(n, _MISSING)} -> {after.get(n, _MISSING)}" for n in names)
    return ", ".join(changes) or "unchanged"
