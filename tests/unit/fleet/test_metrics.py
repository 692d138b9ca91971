"""The signals as metrics: what is known, by labels of which there are few."""

from prometheus_client.registry import Collector

from fleet.metrics import MachineMetrics, SignalMetrics
from fleet.signals.signal_window import SignalWindow
from streams.records.fleet.machine_list import Machine, MachineList, MachineState
from streams.records.fleet.machine_types import MachineType
from tests.unit.fleet.test_ledger_window import ended, refused
from tests.unit.fleet.test_signal_window import GOALS, WINDOW, arriving
from tests.unit.fleet.test_worker_pools import BEAT


def values(metrics: Collector) -> dict[tuple[str, ...], float]:
    """Each sample by its name, without what all begin with, and its labels."""
    return {
        (sample.name.removeprefix("millstream_fleet_"), *sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_what_is_known_is_exported() -> None:
    """An unknown signal has no sample: 0 would be a value."""
    window, metrics = SignalWindow(WINDOW), SignalMetrics()
    assert values(metrics) == {}
    arriving(window, (100, (0, 0, 0)), (102, (4, 400, 80)))
    window.add_heartbeat(BEAT, 102)
    window.add_record(ended(), 102)
    metrics.report = window.report(102, GOALS)
    found = values(metrics)
    assert found["accepted_tokens_per_second", "mock", "standard"] == 220.0
    assert found["goal_attainment", "mock", "standard"] == 1.0
    assert found["workers", "mock", "1", "small"] == 1
    assert found["pace_tokens_per_second", "mock", "1", "small"] == 40.0
    assert ("goal_attainment", "mock", "batch") not in found
    assert ("accepted_tokens_per_second", "mock", "batch") not in found


def test_a_priority_that_is_none_makes_no_series() -> None:
    """A worker may write any text there."""
    window, metrics = SignalWindow(WINDOW), SignalMetrics()
    window.add_refusals(refused(3, "overloaded", "x" * 50), 100)
    metrics.report = window.report(101, GOALS)
    assert {labels[2] for labels in values(metrics)} == {"interactive", "standard", "batch"}


def test_machines_are_counted_by_state_and_paid_while_they_exist() -> None:
    """One that is out of stock costs nothing."""
    metrics = MachineMetrics()
    assert values(metrics) == {}
    states = [MachineState.RUNNING, MachineState.BOOTING, MachineState.OUT_OF_STOCK]
    metrics.known = MachineList(
        types={"small": MachineType("small", price_per_hour=800_000)},
        machines={
            f"m-{number}": Machine("small", "mock", state, 0.0, 0.0)
            for number, state in enumerate(states)
        },
    )
    found = values(metrics)
    assert found["machines", "mock", "small", "running"] == 1
    assert found["machines", "mock", "small", "out_of_stock"] == 1
    assert found["price_per_hour", "small"] == 1.6
