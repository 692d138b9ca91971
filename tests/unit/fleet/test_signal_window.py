"""All signals together: what is known, what is not, and what is forgotten."""

from dataclasses import replace

import orjson
import pytest

from fleet.signals.signal_report import ModelSignals, PrioritySignals
from fleet.signals.signal_window import PRESSURE_SECONDS, SignalWindow
from streams.coordination.gateway_beats import GatewayBeat
from streams.messages import Pressure, ServiceTime
from tests.unit.fleet.test_ledger_window import ended, refused
from tests.unit.fleet.test_worker_pools import BEAT

WINDOW = 10
GOALS = {"mock": {"standard"}}
PRESSURE = Pressure(
    "mock", 1, {"standard": 4}, {"standard": 1.5}, compute=ServiceTime(output_share=0.5)
)


def standard(model: ModelSignals) -> PrioritySignals:
    (signals,) = (signals for signals in model.priorities if signals.priority == "standard")
    return signals


def arriving(window: SignalWindow, *counted: tuple[float, tuple[int, int, int]]) -> None:
    for now, arrived in counted:
        window.add_pressure(replace(PRESSURE, arrived={"standard": arrived}), now)


def test_nothing_is_known_of_a_model_of_which_nobody_has_told() -> None:
    """No report is no demand of 0: a planner must not shrink by it."""
    (model,) = SignalWindow(WINDOW).report(100, GOALS).models
    signals = standard(model)
    assert (signals.requests_per_second, signals.queued, signals.goal.attainment) == (
        None,
        None,
        None,
    )
    assert (model.pools, signals.refused_tokens_per_second) == ([], 0.0)


def test_arrivals_are_told_in_tokens() -> None:
    """Output as much as such requests have generated of what they might."""
    window = SignalWindow(WINDOW)
    arriving(window, (100, (10, 0, 0)), (102, (14, 400, 80)))
    (model,) = window.report(102, GOALS).models
    signals = standard(model)
    assert (signals.requests_per_second, signals.prompt_tokens_per_second) == (2.0, 200.0)
    assert signals.output_tokens_per_second == 20.0
    assert (signals.queued, signals.estimated_wait_seconds) == (4, 1.5)


def test_what_was_refused_is_demand_of_the_size_of_what_was_accepted() -> None:
    """A gateway that refuses keeps the queue short, however much is asked for."""
    window = SignalWindow(WINDOW)
    arriving(window, (100, (0, 0, 0)), (102, (4, 400, 80)))  # 110 tokens each
    window.add_refusals(refused(20), 101)
    window.add_refusals(refused(70, "rate_limit_exceeded"), 101)
    signals = standard(window.report(102, GOALS).models[0])
    assert signals.refused_tokens_per_second == pytest.approx(20 * 110 / WINDOW)
    assert signals.refused == {"overloaded": 20, "rate_limit_exceeded": 70}


def test_its_size_is_that_of_what_has_ended_where_nothing_is_accepted() -> None:
    """And unknown, not 0, where nothing is known at all."""
    window = SignalWindow(WINDOW)
    window.add_refusals(refused(20), 100)
    assert standard(window.report(101, GOALS).models[0]).refused_tokens_per_second is None
    window.add_record(ended(), 101)  # 10 tokens
    assert standard(window.report(101, GOALS).models[0]).refused_tokens_per_second == 20.0


def test_attainment_is_of_all_arrivals() -> None:
    """Refusing whoever would be late is no way to keep goals."""
    window = SignalWindow(WINDOW)
    for number in range(4):
        window.add_record(ended(first=1_000_000 + 200 * number), 100)  # the last one is late
    window.add_refusals(refused(2), 100)
    goal = standard(window.report(101, GOALS).models[0]).goal
    assert (goal.attained, goal.missed, goal.refused, goal.attainment) == (3, 1, 2, 0.5)
    without = standard(window.report(101, {"mock": ()}).models[0]).goal
    assert (without.refused, without.attainment) == (0, 0.75)


def test_a_refusal_without_a_priority_has_a_place_of_its_own() -> None:
    """Some are refused before their priority is read."""
    window = SignalWindow(WINDOW)
    window.add_refusals(refused(3, "model_not_allowed", ""), 100)
    (model,) = window.report(101, GOALS).models
    assert [signals.refused for signals in model.priorities if signals.priority == ""] == [
        {"model_not_allowed": 3}
    ]


def test_gateways_tell_their_rate_and_their_time_for_a_request() -> None:
    """The mean over the window, not since they were started."""
    window = SignalWindow(WINDOW)
    window.add_gateway_beat(GatewayBeat("g1", 5, 100, 1.0, 0.001), 100)
    window.add_gateway_beat(GatewayBeat("g1", 6, 120, 1.4, 0.002, draining=True), 101)
    window.add_gateway_beat(GatewayBeat("g0", 1, 0, 0.0, 0.0), 101)
    idle, busy = window.report(101, {}).gateways
    assert (idle.gateway, idle.requests_per_second, idle.preparation_seconds) == ("g0", None, None)
    assert (busy.requests_per_second, busy.connections, busy.draining) == (20.0, 6, True)
    assert busy.preparation_seconds == pytest.approx(0.02)
    assert busy.loop_lag_seconds == 0.002


def test_whoever_is_silent_is_forgotten() -> None:
    """Old news would hold a fleet where it was."""
    window = SignalWindow(WINDOW)
    arriving(window, (100, (0, 0, 0)), (101, (1, 1, 1)))
    window.add_heartbeat(BEAT, 101)
    window.add_gateway_beat(GatewayBeat("g1", 5, 100, 1.0, 0.001), 101)
    assert standard(window.report(101, {}).models[0]).queued == 4
    report = window.report(101 + PRESSURE_SECONDS + 0.1, {})
    assert (report.models, report.gateways) == ([], [])


def test_a_report_is_json_with_the_attainment_of_each_goal() -> None:
    """The command prints it, and programs compute with it."""
    window = SignalWindow(WINDOW)
    window.add_record(ended(), 100)
    told = orjson.loads(window.report(101, GOALS).pack())
    (found,) = (p for p in told["models"][0]["priorities"] if p["priority"] == "standard")
    assert found["goal"] == {"attained": 1, "missed": 0, "refused": 0, "left": 0}
    assert (found["attainment"], found["ended"]) == (1.0, {"stop": 1})
