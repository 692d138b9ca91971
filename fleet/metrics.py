"""Prometheus metrics of the fleet service: signals, and the provider's machines."""

from collections import Counter as Counted
from collections.abc import Iterator

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleet.signals.signal_report import PoolSignals, PrioritySignals, SignalReport
from streams.records.fleet.machine_list import MachineList
from streams.subjects import Priority
from streams.usage_accounts import MICRO

LEADING = Gauge("millstream_fleet_leading", "1 where this process knows the fleet's signals.")
LEDGER_BEHIND = Gauge(
    "millstream_fleet_ledger_behind_seconds", "Time since the ledger was last read to its end."
)
CURVE_FACTOR = Gauge(
    "millstream_fleet_curve_factor",
    "By how much longer requests take on live workers than was measured.",
    ["model", "version", "type"],
)
PLAN_CHANGES = Counter(
    "millstream_fleet_plan_changes", "Machines that the plan has started and ended.", ["action"]
)
_PRIORITIES = frozenset(map(str, Priority))


class SignalMetrics(Collector):
    """The last report as metrics; none while there is no report."""

    def __init__(self) -> None:
        self.report: SignalReport | None = None

    def collect(self) -> Iterator[Metric]:
        demand, pools = _priority_families(), _pool_families()
        for model in self.report.models if self.report else ():
            for signals in (each for each in model.priorities if each.priority in _PRIORITIES):
                _add_priority(demand, [model.model, signals.priority], signals)
            for pool in model.pools:
                _add_pool(pools, [model.model, pool.version, pool.type], pool)
        yield from demand.values()
        yield from pools.values()


class MachineMetrics(Collector):
    """The provider's machines as metrics; none while this process does not lead."""

    def __init__(self) -> None:
        self.known: MachineList | None = None

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "type", "state"]
        machines = GaugeMetricFamily(
            "millstream_fleet_machines", "Machines of the provider's list.", labels=labels
        )
        prices = GaugeMetricFamily(
            "millstream_fleet_price_per_hour",
            "What the machines that there are cost in an hour, in the currency of their type.",
            labels=["type"],
        )
        if known := self.known:
            counts = Counted((m.model, m.type, m.state.value) for m in known.machines.values())
            for names, count in counts.items():
                machines.add_metric(names, count)
            there = Counted(m.type for m in known.machines.values() if m.state.exists)
            for kind in known.types.values():
                prices.add_metric([kind.name], there[kind.name] * kind.price_per_hour / MICRO)
        yield from (machines, prices)


def _priority_families() -> dict[str, GaugeMetricFamily]:
    told = {
        "accepted_tokens_per_second": "Tokens that arrive and are accepted, expected output too.",
        "refused_tokens_per_second": "Tokens that were refused for want of capacity.",
        "goal_attainment": "Share of arrivals with a goal that kept it, refused ones included.",
    }
    return _make_families(told, ["model", "priority"])


def _pool_families() -> dict[str, GaugeMetricFamily]:
    told = {
        "workers": "Workers that take work.",
        "draining_workers": "Workers that drain.",
        "batch_fill": "Share of the workers' sequences that run.",
        "kv_fill": "Share of the workers' KV tokens that are held.",
        "pace_tokens_per_second": "Tokens a second of each worker that runs something.",
    }
    return _make_families(told, ["model", "version", "type"])


def _make_families(told: dict[str, str], labels: list[str]) -> dict[str, GaugeMetricFamily]:
    return {
        name: GaugeMetricFamily(f"millstream_fleet_{name}", text, labels=labels)
        for name, text in told.items()
    }


def _add_priority(
    families: dict[str, GaugeMetricFamily], labels: list[str], signals: PrioritySignals
) -> None:
    _add(families["accepted_tokens_per_second"], labels, signals.accepted_tokens_per_second)
    _add(families["refused_tokens_per_second"], labels, signals.refused_tokens_per_second)
    _add(families["goal_attainment"], labels, signals.attainment)


def _add_pool(families: dict[str, GaugeMetricFamily], labels: list[str], pool: PoolSignals) -> None:
    _add(families["workers"], labels, pool.workers)
    _add(families["draining_workers"], labels, pool.draining)
    _add(families["batch_fill"], labels, pool.batch_fill)
    _add(families["kv_fill"], labels, pool.kv_fill)
    _add(families["pace_tokens_per_second"], labels, pool.pace)


def _add(family: GaugeMetricFamily, labels: list[str], value: float | None) -> None:
    """Add a value, unless it is not known."""
    if value is not None:
        family.add_metric(labels, value)


SIGNALS, MACHINES = SignalMetrics(), MachineMetrics()
REGISTRY.register(SIGNALS)
REGISTRY.register(MACHINES)
