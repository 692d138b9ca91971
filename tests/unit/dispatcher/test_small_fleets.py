"""Small fleets: no slot stays idle beside queued work, and no guess refuses a request."""

from dataclasses import replace

import pytest

from bench.simulation.runs import Outcome, SimulationRun
from bench.simulation.systems import Ended, Millstream, SimulatedCluster
from bench.simulation.virtual_clock import VirtualClock
from bench.simulation.workloads import Workload
from dispatcher import explain
from dispatcher.dispatching.model_state import ModelState
from dispatcher.queueing.capacity_shares import ACTIVE_SECONDS
from millstream.admin.explanations import explain_request
from simulation.request import RequestSpec
from simulation.step_model import StepModel
from streams.messages import Heartbeat
from streams.subjects import Priority
from tests.unit.dispatcher.queued_requests import COST, queued_request

PROBE_SECONDS = 0.05
SLOTS = (2, 4, 8)
# A request of one prompt token and `n` generated ones takes `n` hundredths of a second
MODEL = StepModel(step_ms=10.0, sequence_ms=0.0, context_us=0.0, prefill_ms=0.0, token_ms=0.0)


class Probe:
    """Looks twenty times a second how long slots have been idle while requests were queued."""

    def __init__(self) -> None:
        self.longest_idle = 0.0
        self._idle_since: float | None = None

    def build(self, cluster: SimulatedCluster, clock: VirtualClock, ended: Ended) -> Millstream:
        self._clock = clock
        self._system = Millstream(cluster, clock, ended)
        self._look()
        return self._system

    def _look(self) -> None:
        free = sum(engine.model.max_sequences - engine.running for engine in self._system.engines)
        if free and len(self._system.leader.state.queue):
            since = self._idle_since = self._idle_since or self._clock.now
            self.longest_idle = max(self.longest_idle, self._clock.now - since)
        else:
            self._idle_since = None
        self._clock.call_later(PROBE_SECONDS, self._look)


def run(slots: int, specs: list[RequestSpec]) -> tuple[Outcome, Probe]:
    probe = Probe()
    cluster = SimulatedCluster((replace(MODEL, max_sequences=slots),))
    seconds = max(spec.at for spec in specs) + 0.1
    return SimulationRun(probe.build, cluster, Workload(specs, seconds)).run(3600.0), probe


def asked(at: float, count: int, tenant: str = "acme", **more: object) -> list[RequestSpec]:
    values = {"prompt_tokens": 1, "output_tokens": 200, "deadline_seconds": 600.0, **more}
    return [RequestSpec(at, tenant, **values) for _ in range(count)]  # type: ignore[arg-type]  # of a test


@pytest.mark.parametrize("max_tokens", [0, 2000])
@pytest.mark.parametrize("slots", SLOTS)
def test_a_cold_fleet_refuses_nobody(slots: int, max_tokens: int) -> None:
    """All would be served within minutes, and nothing that is known says otherwise."""
    specs = asked(0.0, 12 * slots, max_tokens=max_tokens)
    specs += asked(1.0, 5 * slots, max_tokens=max_tokens)
    outcome, _ = run(slots, specs)
    assert [request.code for request in outcome.requests if request.code] == []


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("priority", [Priority.STANDARD, Priority.BATCH])
def test_a_lone_tenant_has_the_whole_fleet(slots: int, priority: Priority) -> None:
    """Its own interactive requests of a moment ago keep nothing free of its other work."""
    specs = [
        spec
        for second in range(10)
        for spec in asked(second, slots // 2, priority=Priority.INTERACTIVE, output_tokens=50)
    ]
    _, probe = run(slots, specs + asked(10.0, 5 * slots, priority=priority))
    assert probe.longest_idle < 1.0


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("priority", [Priority.STANDARD, Priority.BATCH])
def test_what_gives_way_runs_in_the_place_of_one_who_has_left(
    slots: int, priority: Priority
) -> None:
    """Engines that preempt lend an idle slot at once."""
    specs = [
        spec for second in range(10) for spec in asked(second, slots, "other", output_tokens=90)
    ]
    _, probe = run(slots, specs + asked(10.0, 10 * slots, priority=priority))
    assert probe.longest_idle < 1.0


class PatientFleet:
    """A leader whose only worker has some slots, and an engine that does not preempt."""

    def __init__(self, slots: int) -> None:
        self.state, self.slots, self._number = ModelState("mock"), slots, 0
        self.report(slots)

    def report(self, free: int) -> None:
        slots, pulled = self.slots, {"batch": 10**9}  # nothing is left in WORK
        beat = Heartbeat(
            "w",
            "mock",
            "1",
            free,
            free * COST,
            slots - free,
            0,
            slots,
            slots * COST,
            0,
            0.0,
            pulled,
        )
        self.state.apply_heartbeat(beat, 0.0)

    def enqueue(self, tenant: str, priority: Priority, now: float) -> str:
        item = queued_request(self._number, tenant, priority, accepted=round(1000 * now))
        self._number += 1
        self.state.queue.enqueue(item, now)
        return item.request_id

    def serve(self, tenant: str, priority: Priority, now: float, ends: bool = True) -> None:
        """Dispatch a tenant's request; it ends at once unless it is to stay in flight."""
        item = self.state.queue.get(self.enqueue(tenant, priority, now))
        assert item
        self.state.reserve(item, "1", now)
        self.state.mark_published(item.request_id, item.seq, duplicate=False)
        if ends:
            self.state.settle(item.request_id, 150, now)
            self.state.fleet.discard({item.seq})

    def queue_batch_after_requests_of(self, tenant: str) -> str:
        """Serve a tenant's interactive requests for 20 s, and queue acme's batch work behind."""
        for second in range(20):
            self.serve(tenant, Priority.INTERACTIVE, second)
        self.serve("acme", Priority.BATCH, 20.0, ends=False)
        self.report(free=1)
        return self.enqueue("acme", Priority.BATCH, 20.0)

    def next_tenant(self, now: float) -> str | None:
        found = self.state.select_next(lambda _: "1", now)
        return found[0].tenant if found else None


@pytest.mark.parametrize("slots", SLOTS)
def test_batch_work_waits_for_what_others_will_ask_and_says_so(slots: int) -> None:
    """For minutes after the last request of the others nothing is kept any more."""
    fleet = PatientFleet(slots)
    request = fleet.queue_batch_after_requests_of("other")
    assert fleet.next_tenant(20.0) is None
    facts = explain.explain_request(fleet.state, request, "1", 20.0)
    assert facts
    assert facts["reason"] == "kept_for_others"
    assert "kept for other tenants" in explain_request(facts)
    assert fleet.next_tenant(20.0 + ACTIVE_SECONDS) == "acme"


@pytest.mark.parametrize("slots", SLOTS)
def test_no_tenant_waits_for_itself(slots: int) -> None:
    """Its batch work runs beside its interactive requests, also where nothing preempts."""
    fleet = PatientFleet(slots)
    fleet.queue_batch_after_requests_of("acme")
    assert fleet.next_tenant(20.0) == "acme"
