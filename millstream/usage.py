"""`millstream usage`: what tenants and keys with quotas have used, and what they may."""

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from millstream.lag import PIPE_COLUMNS
from millstream.settings import UsageSettings
from registry.tenants import Limits, Tenants
from streams import subjects, topology, windows
from streams.connection import Broker, connect
from streams.errors import MillstreamError
from streams.timekeeping import look
from streams.usage import PICO, TENANT, Meter, key_scope
from streams.windows import Window

Report = dict[str, Any]
Counters = Mapping[str, int]


class TenantNotFound(MillstreamError):
    """No tenant of this name."""


async def run(settings: UsageSettings, stop: asyncio.Event) -> None:
    """Print one line for each tenant and key with quotas. Raises `TenantNotFound`."""
    async with connect(settings.nats, "usage") as broker:
        tenants = await Tenants.open(broker)
        try:
            if settings.tenant and tenants.get(settings.tenant) is None:
                raise TenantNotFound(f"there is no tenant {settings.tenant!r}")
            await look(broker)
            rows = await collect(broker, tenants, broker.clock.now())
        finally:
            await tenants.close()
    _print([r for r in rows if settings.tenant in (None, r["tenant"])], settings.as_json)


async def collect(broker: Broker, tenants: Tenants, now: float) -> list[Report]:
    """What is used at `now` (epoch seconds) by each tenant and key with quotas, and its quotas."""
    counters = await _counters(broker, windows.day(now))
    found: list[tuple[str, str, Limits]] = [(t.name, TENANT, t) for t in tenants.by_name.values()]
    found += [(key.tenant, key_scope(key.name), key) for key in tenants.keys]
    return [
        _row(tenant, scope, limits, counters, now)
        for tenant, scope, limits in sorted(found, key=lambda each: (each[0], each[1] != TENANT))
        if limits.limited
    ]


async def _counters(broker: Broker, day: str) -> Counters:
    streams = ((topology.USAGE, subjects.usage_on(day)), (topology.RATES, subjects.ALL_RATES))
    stored = [m for each in streams for m in await broker.read_subject(*each)]
    return {message.subject: int(json.loads(message.data)["val"]) for message in stored}


def _row(tenant: str, scope: str, limits: Limits, counters: Counters, now: float) -> Report:
    def rate(meter: Meter, slot: int) -> int:
        return counters.get(subjects.rate(tenant, scope, meter, slot), 0)

    def minute(meter: Meter) -> int:
        slot = windows.minute(now)
        return round(Window(rate(meter, slot - 1), rate(meter, slot), now).level(now))

    def today(meter: Meter) -> int:
        return counters.get(subjects.usage(tenant, scope, meter, windows.day(now)), 0)

    used = {
        "requests_per_minute": minute(Meter.REQUESTS),
        "tokens_per_minute": minute(Meter.TOKENS),
        "max_concurrent": max(rate(Meter.OPEN, lease) for lease in windows.leases(now)),
        "tokens_per_day": today(Meter.TOKENS),
        "spend_per_day": today(Meter.SPEND) / PICO,
    }
    quotas = {name: {"used": used[name], "limit": getattr(limits, name)} for name in used}
    return {"tenant": tenant, "scope": scope, **quotas}


def _print(rows: list[Report], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table(rows))


def table(rows: list[Report]) -> Table:
    """Used of allowed, for people; what has no quota is not counted."""
    made = Table("tenant", "of")
    for title in ("requests / min", "tokens / min", "open", "tokens today", "spent today"):
        made.add_column(title, justify="right")
    for row in rows:
        quotas = [_of(**value) for value in row.values() if isinstance(value, dict)]
        made.add_row(row["tenant"], row["scope"], *quotas)
    return made


def _of(used: float, limit: float | None) -> str:
    return "" if limit is None else f"{used:,.10g} of {limit:,.10g}"
