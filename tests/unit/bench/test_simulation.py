"""The simulator around the engine: clock, baselines, measures, and Millstream's own code in it."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest

from bench import simulate
from bench.simulation import measures, workloads
from bench.simulation.baselines import EarlyReject, Edf, Fcfs, Policy, Replicas, Vtc
from bench.simulation.report import SimulationReport, table
from bench.simulation.runs import Outcome, SimulationRun, capacity
from bench.simulation.scenario import Figure, Scenario, Setting
from bench.simulation.systems import Build, Millstream, SimulatedCluster, peak_tokens, with_policy
from bench.simulation.virtual_clock import VirtualClock
from bench.simulation.workloads import Workload
from simulation.request import RequestSpec, SimulatedRequest
from simulation.step_model import StepModel

SMALL = SimulatedCluster((StepModel(kv_tokens=2000),))
QUESTION = RequestSpec(0.0, "t", 100, 50)


def simulated(build: Build, asked: list[RequestSpec], plant: SimulatedCluster = SMALL) -> Outcome:
    return SimulationRun(build, plant, Workload(asked, 10.0)).run(drain_seconds=1000.0)


def two_tenants(seed: int) -> list[RequestSpec]:
    random = Random(seed)
    busy, calm = (replace(QUESTION, tenant=name) for name in ("busy", "calm"))
    return workloads.merged(
        workloads.poisson(busy, 20.0, 10.0, random), workloads.poisson(calm, 10.0, 10.0, random)
    )


def popped(policy: Policy, asked: list[RequestSpec]) -> list[str]:
    """The tenants in the order in which they are served."""
    for number, each in enumerate(asked):
        policy.push(SimulatedRequest(each, f"r{number}"))
    return [policy.pop().spec.tenant for _ in asked]


def test_acts_of_one_time_run_in_the_order_they_were_set() -> None:
    """Else a run would depend on how a heap breaks ties."""
    clock, ran = VirtualClock(), list[str]()
    clock.call_at(1.0, lambda: ran.append("first"))
    clock.call_at(1.0, lambda: ran.append("second"))
    clock.call_at(0.5, lambda: ran.append("zeroth"))
    clock.run(until=1.0)
    assert ran == ["zeroth", "first", "second"]


@pytest.mark.parametrize(
    "build", [Millstream, with_policy(Fcfs), with_policy(Vtc), with_policy(EarlyReject)]
)
def test_every_request_ends_once_and_no_token_is_lost(build: Build) -> None:
    """Under more than there is room for, with deadlines that some miss."""
    asked = [replace(each, deadline_seconds=20.0) for each in two_tenants(seed=1)]
    outcome = simulated(build, asked)
    assert len(outcome.requests) == len(asked)
    assert all(fate.is_over for fate in outcome.requests)
    assert all(f.generated == f.spec.output_tokens for f in outcome.requests if f.completed)
    generated = sum(fate.generated for fate in outcome.requests)
    assert sum(engine.generated_tokens for engine in outcome.engines) == generated
    assert all(engine.idle and engine.kv_used == 0 for engine in outcome.engines)


@pytest.mark.parametrize("build", [Millstream, with_policy(Vtc)])
def test_a_seed_gives_the_same_run_again(build: Build) -> None:
    """Else no two versions of a scheduler could be compared."""
    first, second = (simulated(build, two_tenants(seed=7)) for _ in range(2))
    assert first.events == second.events
    assert [(f.first, f.ended) for f in first.requests] == [
        (f.first, f.ended) for f in second.requests
    ]


def test_fcfs_begins_requests_in_the_order_they_came() -> None:
    """A short one behind a long one waits, though there would be room for it."""
    sizes = Random(3)
    asked = [replace(each, prompt_tokens=sizes.randrange(1, 1500)) for each in two_tenants(seed=2)]
    started = [fate.started for fate in simulated(with_policy(Fcfs), asked).requests]
    assert None not in started
    assert started == sorted(started, key=lambda at: at or 0.0)


def test_one_request_takes_the_way_that_the_delays_add_up_to() -> None:
    """Stored 1, indexed 2, fetched 3, in WORK 4, pulled 5, claimed 6 ms; a step; stored, heard."""
    [fate] = simulated(Millstream, [QUESTION]).requests
    step = 0.010 + 0.00026 * 100
    assert fate.started == pytest.approx(0.005)
    assert fate.first == pytest.approx(0.006 + step + 0.002)


def test_tenants_that_ask_for_too_much_get_the_same() -> None:
    """The rule that Millstream's own queue is for; FCFS serves by how much is asked for."""
    fair, unfair = (
        measures.service_by_tenant(simulated(build, two_tenants(seed=5)).requests, 2.0, 30.0)
        for build in (Millstream, with_policy(Fcfs))
    )
    assert fair["busy"] == pytest.approx(fair["calm"], rel=0.1)
    assert unfair["busy"] > 1.5 * unfair["calm"]


def test_vtc_serves_the_lowest_counter_next() -> None:
    """A request that costs twice as much counts twice."""
    asked = [replace(QUESTION, tenant=tenant) for tenant in "aaaabb"]
    policy = Vtc({"a": 2.0, "b": 1.0})
    assert popped(policy, asked) == ["a", "b", "a", "a", "b", "a"]


def test_vtc_gives_no_credit_for_an_absence() -> None:
    """Who comes late is lifted to the lowest counter of those that wait."""
    policy = Vtc()
    assert popped(policy, [replace(QUESTION, tenant="a")] * 3) == ["a"] * 3
    waiting = [replace(QUESTION, tenant=tenant) for tenant in "abab"]
    assert popped(policy, waiting) == ["a", "b", "a", "b"]


def test_edf_serves_the_earliest_goal_or_deadline_next() -> None:
    """Whichever of the two comes first."""
    asked = [
        replace(QUESTION, tenant="deadline", deadline_seconds=20.0),
        replace(QUESTION, tenant="goal", goal_seconds=5.0),
        replace(QUESTION, tenant="patient"),
    ]
    assert popped(Edf(), asked) == ["goal", "deadline", "patient"]


def test_replicas_that_know_nothing_of_each_other_serve_their_tenants_alike() -> None:
    """Whatever the weights say: what one leader for all gateways is there to mend."""
    asked = [replace(QUESTION, tenant="heavy")] * 4
    asked += [replace(QUESTION, tenant="light", gateway=1)] * 4
    served = popped(Replicas(2, {"heavy": 4.0}), asked)
    assert served == ["heavy", "light"] * 4


def test_a_batch_is_judged_by_its_peak() -> None:
    """20 + 10 tokens when the short one ends, 15 + 25 would have been its sum of reserves."""
    short, long = (
        SimulatedRequest(replace(QUESTION, prompt_tokens=5, output_tokens=n), str(n))
        for n in (10, 20)
    )
    assert peak_tokens([short, long], {}) == 30
    assert peak_tokens([short, long], {long: 15}) == 35


def test_the_gap_is_the_largest_difference_of_what_tenants_have_got() -> None:
    """One gets 300 virtual tokens over 6 s, the other as much over the 4 s behind that."""
    a, b = (SimulatedRequest(replace(QUESTION, tenant=t, output_tokens=100), t) for t in "ab")
    a.first, a.ended, b.first, b.ended = 0.0, 6.0, 6.0, 10.0
    assert measures.accumulated_gap([a, b], 10.0) == pytest.approx(300.0)


def test_who_asked_for_nothing_lacks_nothing() -> None:
    """A tenant's lack is bounded by what it wanted and did not get."""
    got = SimulatedRequest(replace(QUESTION, at=5.0, tenant="a", output_tokens=100), "a")
    got.first, got.ended = 5.0, 6.0
    refused = SimulatedRequest(replace(QUESTION, at=5.0, tenant="b", output_tokens=25), "b")
    [most] = {round(each, 6) for each in measures.service_differences([got, refused], 10.0)}
    assert most == pytest.approx(150 / measures.WINDOW_SECONDS)


def test_who_repeats_asks_again_once_it_is_answered() -> None:
    """So that a number of connections is kept busy, and no more."""
    outcome = simulated(Millstream, [replace(QUESTION, repeats=True)] * 3)
    times = sorted((fate.spec.at, fate.ended or 0.0) for fate in outcome.requests)
    assert len(times) > 3
    assert all(sum(a <= at < end for a, end in times) <= 3 for at, _ in times)


def test_capacity_is_what_a_worker_completes_while_many_wait() -> None:
    """Twice the KV, and nearly twice the batch: more, though not twice as much."""
    sizes = (QUESTION,) * 100
    small, large = (capacity(StepModel(kv_tokens=tokens), sizes) for tokens in (1000, 2000))
    assert small < large < 2 * small


def test_capacity_is_known_though_the_first_step_takes_long() -> None:
    """A step full of prompt tokens takes longer than the moment at which all of these come."""
    assert capacity(StepModel(), (RequestSpec(0, "t", 2000, 10),)) > 0


def test_an_unknown_scenario_is_named_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rather than nothing being run."""
    with pytest.raises(SystemExit):
        simulate.main(["b7"])
    assert "'b7'" in capsys.readouterr().err


def test_what_never_ended_is_null_in_the_file_and_named_in_the_table(tmp_path: Path) -> None:
    """JSON knows no infinity, and other programs read the file."""
    figure = Figure("p99", "p99, s", goal=1.0)
    scenario = Scenario("endless", "nobody is served", (figure,), lambda setting, seed: {})
    report = SimulationReport([], Setting(StepModel(), tmp_path))
    measured = report.add(scenario, [{"millstream": {"p99": inf}}])
    report.write(tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["scenarios"]["endless"]["worst"] == {"millstream": {"p99": None}}
    assert [list(column.cells) for column in table(measured).columns][1:3] == [["inf"], ["≤ 1 ✗"]]
