"""The tables of `millstream fleet signals`: demand, pools of workers, gateways. Pure."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group

from millstream.admin.fitted_table import Column, FittedTable

_PRIORITY_COLUMNS = (
    Column("model", "name"),
    Column("priority"),
    Column("arrivals\n/s", is_number=True),
    Column("tokens\n/s", is_number=True),
    Column("refused\ntokens/s", is_number=True),
    Column("queued", is_number=True),
    Column("estimated\nwait", is_number=True),
    Column("waited", is_number=True, rank=2),
    Column("goal\nkept", is_number=True),
    Column("ended", is_number=True, rank=1),
    Column("refused", "text", least=12),
)
_POOL_COLUMNS = (
    Column("model", "name"),
    Column("version", "name", rank=1),
    Column("type", "name"),
    Column("workers", is_number=True),
    Column("draining", is_number=True, rank=3),
    Column("running", is_number=True),
    Column("waiting", is_number=True, rank=2),
    Column("batch\nfill", is_number=True),
    Column("KV\nfill", is_number=True),
    Column("tokens\n/s", is_number=True),
    Column("pace", is_number=True),
)
_GATEWAY_COLUMNS = (
    Column("gateway", "name"),
    Column("connections", is_number=True),
    Column("requests\n/s", is_number=True),
    Column("preparation", is_number=True),
    Column("loop lag", is_number=True),
    Column("state"),
)
Told = Mapping[str, Any]


def render_signals(report: Told) -> Group:
    """Render a report, as `SignalReport.pack` has it, as three tables."""
    models = report["models"]
    priorities = (
        _priority_row(each["model"], row) for each in models for row in each["priorities"]
    )
    pools = (_pool_row(each["model"], pool) for each in models for pool in each["pools"])
    gateways = (_gateway_row(each) for each in report["gateways"])
    title = f"Demand, over {report['window_seconds']:g} s"
    return Group(
        FittedTable(_PRIORITY_COLUMNS, priorities, title),
        FittedTable(_POOL_COLUMNS, pools, "Workers"),
        FittedTable(_GATEWAY_COLUMNS, gateways, "Gateways"),
    )


def _priority_row(model: str, row: Told) -> tuple[str, ...]:
    prompt, output = row["prompt_tokens_per_second"], row["output_tokens_per_second"]
    refused = (f"{count:,} {code}" for code, count in sorted(row["refused"].items()))
    return (
        model,
        row["priority"] or "unknown",
        _number(row["requests_per_second"]),
        _number(None if prompt is None else prompt + output),
        _number(row["refused_tokens_per_second"]),
        "unknown" if row["queued"] is None else f"{row['queued']:,}",
        _seconds(row["estimated_wait_seconds"]),
        _seconds(row["mean_queue_seconds"]),
        _share(row["attainment"]),
        f"{sum(row['ended'].values()):,}",
        ", ".join(refused) or "-",
    )


def _pool_row(model: str, pool: Told) -> tuple[str, ...]:
    return (
        model,
        pool["version"],
        pool["type"] or "-",
        f"{pool['workers']:,}",
        f"{pool['draining']:,}",
        f"{pool['running']:,}",
        f"{pool['waiting']:,}",
        _share(pool["batch_fill"]),
        _share(pool["kv_fill"]),
        _number(pool["tokens_per_second"]),
        _number(pool["pace"]),
    )


def _gateway_row(gateway: Told) -> tuple[str, ...]:
    return (
        gateway["gateway"],
        f"{gateway['connections']:,}",
        _number(gateway["requests_per_second"]),
        _milliseconds(gateway["preparation_seconds"]),
        _milliseconds(gateway["loop_lag_seconds"]),
        "draining" if gateway["draining"] else "serving",
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.1f}"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} s"


def _milliseconds(value: float | None) -> str:
    return "unknown" if value is None else f"{1000 * value:.1f} ms"


def _share(value: float | None) -> str:
    """A share of something; without that there is none."""
    return "-" if value is None else f"{value:.1%}"
