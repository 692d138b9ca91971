"""`millstream usage`: prints quotas and what is used of them, or what a tenant has used before."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from millstream.admin.console_output import make_console, print_json_lines
from millstream.admin.fitted_table import Column, FittedTable
from millstream.admin.settings import UsageSettings
from registry.tenant_records import QuotaLimits
from registry.tenants import TenantNotFound, Tenants, check_tenant
from streams import quota_windows, subjects, topology
from streams.broker.broker_client import Broker, connect
from streams.broker.clock_sync import sample_once
from streams.errors import MillstreamError
from streams.quota_windows import QuotaPeriod, QuotaWindow
from streams.records import usage_sums
from streams.records.quota_thresholds import QuotaThreshold
from streams.records.usage_rollups import UsageRollups
from streams.usage_accounts import NANOSECONDS_PER_HOUR, PICO, TENANT_SCOPE, Meter, key_scope

UsageRow = dict[str, Any]
Counters = Mapping[str, int]
_THRESHOLD_COLUMNS = (
    Column("reached"),
    Column("tenant", "name"),
    Column("of", "name"),
    Column("quota"),
    Column("period"),
    Column("part", is_number=True),
    Column("used", "text", least=11, is_number=True),
)


class WrongDays(MillstreamError):
    """The days in the settings of `millstream usage` are none, or too many."""


async def run(settings: UsageSettings, stop: asyncio.Event) -> None:
    """Print the used amount and the limit of each quota, for all tenants and API keys with quotas.

    If `settings.tenant` is given, only that tenant and its keys are printed. With `settings.by`,
    what the tenant has used is printed instead, with `settings.costs` what workers cost, and with
    `settings.thresholds` which parts of quotas were reached. Raises `TenantNotFound` if that tenant
    does not exist, `WrongDays` for days that are none, and `BrokerUnavailable` if the broker does
    not answer.
    """
    if settings.thresholds:
        await _show_thresholds(settings)
    elif settings.by:
        await _show_past_usage(settings, settings.by)
    else:
        await _show_quotas(settings)


async def _show_quotas(settings: UsageSettings) -> None:
    async with connect(settings.nats, "usage", settings.nats_files) as broker:
        tenants = await Tenants.open(broker)
        try:
            if settings.tenant and tenants.get(settings.tenant) is None:
                raise TenantNotFound(settings.tenant)
            await sample_once(broker)
            rows = await collect_usage(broker, tenants, broker.clock.now())
        finally:
            await tenants.close()
    shown = [row for row in rows if settings.tenant in (None, row["tenant"])]
    _print_rows(shown, settings)


async def _show_past_usage(settings: UsageSettings, by: str) -> None:
    async with connect(settings.nats, "usage", settings.nats_files) as broker:
        await sample_once(broker)
        start, end = usage_sums.recent_days(broker.clock.now())
        try:
            days = usage_sums.list_days(settings.start or start, settings.end or end)
        except ValueError as error:
            raise WrongDays(str(error)) from None
        rollups = UsageRollups(broker)
        await rollups.roll_up()
        if settings.costs:
            sums = usage_sums.add_up_costs(await rollups.read_costs(days), by)
        else:
            assert settings.tenant, "the settings require it"
            rows = usage_sums.add_up(await rollups.read(settings.tenant, days), by)
            if not rows:
                await check_tenant(broker, settings.tenant)
            sums = [{"tenant": settings.tenant, **row} for row in rows]
    if settings.as_json:
        print("".join(json.dumps(row) + "\n" for row in sums), end="")
    else:
        make_console().print((render_costs if settings.costs else render_past_usage)(sums, by))


async def _show_thresholds(settings: UsageSettings) -> None:
    pattern = subjects.thresholds_of(settings.tenant)
    async with connect(settings.nats, "usage", settings.nats_files) as broker:
        stored = await broker.read_subject(topology.THRESHOLDS, pattern)
        if settings.tenant and not stored:
            await check_tenant(broker, settings.tenant)
    events = [json.loads(message.data) for message in stored]
    if settings.as_json:
        print_json_lines(events)
    else:
        make_console().print(FittedTable(_THRESHOLD_COLUMNS, [_threshold_row(e) for e in events]))


def _threshold_row(event: Mapping[str, Any]) -> tuple[str, ...]:
    reached, at = QuotaThreshold(**event["data"]), datetime.fromtimestamp(event["created_at"], UTC)
    unit = PICO if reached.quota.startswith(Meter.SPEND) else 1
    return (
        f"{at:%Y-%m-%d %H:%M:%S}",
        reached.tenant,
        reached.scope,
        reached.quota,
        reached.period,
        f"{reached.percent} %",
        _format_used(reached.used / unit, reached.limit / unit),
    )


def render_past_usage(sums: list[UsageRow], by: str) -> FittedTable:
    """Return the results of `usage_sums.add_up` as a table for rich."""
    names = ("requests", "prompt", "cached", "completion", "amount")
    columns = (Column(by, "name"), Column("currency"), *(Column(n, is_number=True) for n in names))
    fields = ("prompt_tokens", "cached_tokens", "completion_tokens", "amount")
    shown = (by, "currency", "requests", *fields)
    cells = [[str(row[name]) for name in shown] for row in sums]
    return FittedTable(columns, cells)


def render_costs(sums: list[UsageRow], by: str) -> FittedTable:
    """Return the results of `usage_sums.add_up_costs` as a table for rich: amounts of currency."""
    uses = ("worker", "requests", "idle", "load", "lost", "open")
    words = (Column(by, "name"), Column("type"), Column("currency"))
    columns = (*words, Column("hours", is_number=True), *(Column(u, is_number=True) for u in uses))
    cells = [
        [
            str(row[by]),
            row["type"],
            row["currency"],
            f"{row['nanoseconds']['worker'] / NANOSECONDS_PER_HOUR:.2f}",
            *(row["amounts"][use] for use in uses),
        ]
        for row in sums
    ]
    return FittedTable(columns, cells)


async def collect_usage(broker: Broker, tenants: Tenants, now: float) -> list[UsageRow]:
    """Return a row for each tenant and each API key that has quotas, with its use as of `now`.

    `now` is in epoch seconds. A row has `tenant`, `scope` (the tenant itself or one of its keys),
    and for each quota a dict of `used` and `limit`, whose `limit` is None where there is none. Rows
    are sorted by tenant, the tenant's own row before those of its keys. Raises `BrokerUnavailable`
    if the broker does not answer.
    """
    counters = await _read_counters(broker, [period.name_at(now) for period in QuotaPeriod])
    scopes: list[tuple[str, str, QuotaLimits]] = [
        (t.name, TENANT_SCOPE, t) for t in tenants.by_name.values()
    ]
    scopes += [(key.tenant, key_scope(key.name), key) for key in tenants.keys]
    return [
        _make_row(tenant, scope, limits, counters, now)
        for tenant, scope, limits in sorted(
            scopes, key=lambda each: (each[0], each[1] != TENANT_SCOPE)
        )
        if limits.has_limits
    ]


async def _read_counters(broker: Broker, periods: Iterable[str]) -> Counters:
    streams = [(topology.USAGE, subjects.usage_on(period)) for period in periods]
    streams.append((topology.RATES, subjects.ALL_RATES))
    stored = [m for each in streams for m in await broker.read_subject(*each)]
    return {message.subject: int(json.loads(message.data)["val"]) for message in stored}


def _make_row(
    tenant: str, scope: str, limits: QuotaLimits, counters: Counters, now: float
) -> UsageRow:
    def rate(meter: Meter, slot: int) -> int:
        return counters.get(subjects.rate(tenant, scope, meter, slot), 0)

    def minute(meter: Meter) -> int:
        slot = quota_windows.minute_number(now)
        return round(QuotaWindow(rate(meter, slot - 1), rate(meter, slot), now).used_at(now))

    def in_period(meter: Meter, period: QuotaPeriod) -> int:
        return counters.get(subjects.usage(tenant, scope, meter, period.name_at(now)), 0)

    used: dict[str, float] = {
        "requests_per_minute": minute(Meter.REQUESTS),
        "tokens_per_minute": minute(Meter.TOKENS),
        "max_concurrent": max(rate(Meter.OPEN, lease) for lease in quota_windows.open_slots(now)),
    }
    for period in QuotaPeriod:
        used[f"tokens_per_{period}"] = in_period(Meter.TOKENS, period)
        used[f"spend_per_{period}"] = in_period(Meter.SPEND, period) / PICO
    quotas = {name: {"used": used[name], "limit": getattr(limits, name)} for name in used}
    return {"tenant": tenant, "scope": scope, **quotas}


def _print_rows(rows: list[UsageRow], settings: UsageSettings) -> None:
    if settings.as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        make_console().print(render_table(rows))
    else:
        tenant = settings.tenant or "TENANT"
        print(f"no quotas; `millstream usage --tenant {tenant} --by day` shows what was used")


def render_table(rows: list[UsageRow]) -> FittedTable:
    """Return rows of `collect_usage` as a table for rich; a quota's cell is such as "20 of 100".

    The cell of a quota without a limit is empty, even if something was used.
    """
    rates = ("requests\n/ min", "tokens\n/ min", "open")
    sums = ("tokens\ntoday", "spent\ntoday", "tokens\nin month", "spent\nin month")
    titles = (*rates, *sums)
    quotas = (Column(title, "text", least=11, is_number=True) for title in titles)
    cells = [
        (
            row["tenant"],
            row["scope"],
            *(_format_used(**v) for v in row.values() if isinstance(v, dict)),
        )
        for row in rows
    ]
    return FittedTable((Column("tenant", "name"), Column("of", "name"), *quotas), cells)


def _format_used(used: float, limit: float | None) -> str:
    return "" if limit is None else f"{used:,.10g} of {limit:,.10g}"
