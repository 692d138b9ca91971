"""The systems that are compared: Millstream, and baselines with one queue before the engines."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bench.simulation.baselines import Policy
from bench.simulation.delays import Delays
from bench.simulation.gateway import SimulatedGateway
from bench.simulation.leader import SimulatedLeader
from bench.simulation.virtual_clock import VirtualClock
from bench.simulation.work_stream import WorkStream
from bench.simulation.worker import Listeners, SimulatedWorker
from simulation.engine import SimulatedEngine
from simulation.prefix_cache import PrefixCacheModel
from simulation.request import RequestSpec, SimulatedRequest
from simulation.step_model import StepModel
from streams.messages import Pressure

TAKE_STEPS = 10  # VTC's server looks for room after so many steps
Ended = Callable[[SimulatedRequest], None]


@dataclass(frozen=True)
class SimulatedCluster:
    """The cluster of every system in a comparison: workers and their speeds, gateways, weights."""

    workers: tuple[StepModel, ...] = (StepModel(),)
    gateways: int = 1
    weights: Mapping[str, float] = field(default_factory=dict)
    caches_prefixes: bool = False
    delays: Delays = field(default_factory=Delays)

    def engines(self) -> list[SimulatedEngine]:
        """New engines, one for each worker."""
        return [SimulatedEngine(model, self._prefixes(model)) for model in self.workers]

    def _prefixes(self, model: StepModel) -> PrefixCacheModel | None:
        return PrefixCacheModel(model.kv_tokens) if self.caches_prefixes else None


class System(Protocol):
    """A system under test: takes requests, and calls `ended` once for each, however it ends."""

    engines: list[SimulatedEngine]

    def submit(self, spec: RequestSpec) -> SimulatedRequest:
        """Submit a request at the clock's present time."""


Build = Callable[[SimulatedCluster, VirtualClock, Ended], System]


class Millstream:
    """Millstream as a whole: gateways, a leader and workers, with the real scheduler's code."""

    def __init__(self, cluster: SimulatedCluster, clock: VirtualClock, ended: Ended) -> None:
        self._clock, self._delays, self._report_ended = clock, cluster.delays, ended
        self.engines = cluster.engines()
        self._numbers = itertools.count()
        self._gateways = [SimulatedGateway(clock) for _ in range(cluster.gateways)]
        work = WorkStream(clock, cluster.delays)
        self.leader = SimulatedLeader(
            clock, cluster.delays, work, cluster.weights, self._send_pressure, self._end
        )
        listeners = Listeners(self.leader.receive_heartbeat, self._note_first_token, self._on_ended)
        for number, engine in enumerate(self.engines):
            SimulatedWorker(f"w{number}", engine, work, clock, cluster.delays, listeners).start()
        self.leader.start()

    def submit(self, spec: RequestSpec) -> SimulatedRequest:
        """Submit a request to its gateway, which may refuse it."""
        request = SimulatedRequest(spec, f"r{next(self._numbers)}")
        if not self._gateways[spec.gateway % len(self._gateways)].try_admit(request):
            self._end(request, request.code)
            return request
        request.accepted = self._clock.now
        arrival = self._delays.store + self._delays.hop
        self._clock.call_later(arrival, lambda: self.leader.enqueue(request))
        return request

    def _send_pressure(self, pressure: Pressure) -> None:
        """Deliver a pressure report to all gateways."""

        def hear() -> None:
            for gateway in self._gateways:
                gateway.receive_pressure(pressure)

        self._clock.call_later(self._delays.hop, hear)

    def _note_first_token(self, request: SimulatedRequest) -> None:
        request.first = self._clock.now

    def _on_ended(self, request: SimulatedRequest, code: str) -> None:
        """A worker has stored the terminal: tell the client, then the leader by the ledger."""
        self._clock.call_later(self._delays.hop, lambda: self._end(request, code))
        ledger = self._delays.store + self._delays.hop
        self._clock.call_later(ledger, lambda: self.leader.settle(request))

    def _end(self, request: SimulatedRequest, code: str) -> None:
        request.ended, request.code = self._clock.now, code
        self._report_ended(request)


class Direct:
    """A baseline: one queue, from whose head engines take what fits.

    An engine takes requests when one of its own ends, and every `TAKE_STEPS` steps. A request joins
    a batch if the KV would hold until all of the batch has ended, as VTC's server judges. A request
    that has missed its deadline is run all the same, since nobody tells the engine.
    """

    def __init__(
        self, policy: Policy, cluster: SimulatedCluster, clock: VirtualClock, ended: Ended
    ) -> None:
        self._policy = policy
        self.engines = cluster.engines()
        self._clock, self._report_ended = clock, ended
        self._numbers = itertools.count()
        self._stepping: set[int] = set()
        self._batches: list[dict[str, SimulatedRequest]] = [{} for _ in self.engines]
        clock.call_every(cluster.delays.pressure, lambda: policy.tick(clock.now))

    def submit(self, spec: RequestSpec) -> SimulatedRequest:
        """Queue a request if the policy admits it; idle engines take it at once."""
        request = SimulatedRequest(spec, f"r{next(self._numbers)}")
        if not self._policy.admits(request):
            request.ended, request.code = self._clock.now, "overloaded"
            self._report_ended(request)
            return request
        request.accepted = self._clock.now
        self._policy.push(request)
        for number in range(len(self.engines)):
            if number not in self._stepping:
                self._fill_batch(number)
                self._begin_step(number)
        return request

    def _fill_batch(self, number: int) -> None:
        engine = self.engines[number]
        generated = dict(engine.progress())
        for running, tokens in generated.items():
            self._policy.progress(running, tokens)
        while (request := self._policy.head()) and self._fits(number, request, generated):
            self._policy.pop()
            request.started, request.worker = self._clock.now, f"w{number}"
            self._batches[number][request.request_id] = request
            engine.add(request)

    def _fits(
        self, number: int, request: SimulatedRequest, generated: Mapping[SimulatedRequest, int]
    ) -> bool:
        """True if a request fits an engine's batch, in sequences and in KV until all have ended."""
        model, batch = self.engines[number].model, self._batches[number]
        if len(batch) >= model.max_sequences:
            return False
        return peak_tokens([*batch.values(), request], generated) <= model.kv_tokens

    def _begin_step(self, number: int) -> None:
        seconds = self.engines[number].begin_step()
        if seconds is not None:
            self._stepping.add(number)
            self._clock.call_later(seconds, lambda: self._finish_step(number))

    def _finish_step(self, number: int) -> None:
        self._stepping.discard(number)
        engine = self.engines[number]
        stepped = engine.finish_step()
        for request in stepped.first:
            request.first = self._clock.now
        for request in stepped.ended:
            self._end(number, request)
        if stepped.ended or engine.steps % TAKE_STEPS == 0:
            self._fill_batch(number)
        self._begin_step(number)

    def _end(self, number: int, request: SimulatedRequest) -> None:
        del self._batches[number][request.request_id]
        request.ended = self._clock.now
        request.code = "deadline_exceeded" if request.ended > request.deadline else ""
        self._policy.progress(request, request.generated)
        self._report_ended(request)


def peak_tokens(batch: list[SimulatedRequest], generated: Mapping[SimulatedRequest, int]) -> int:
    """The most KV tokens that a batch will come to hold, as each of it ends at its reserve.

    When one ends, those that go on have each grown by what was left to it: `_can_add_new_req` of
    S-LoRA (Sheng et al., MLSys 2024).
    """
    remaining = [(request.spec.reserve - generated.get(request, 0), request) for request in batch]
    remaining.sort(key=lambda entry: -entry[0])
    held = peak = 0
    for number, (more, request) in enumerate(remaining, 1):
        held += request.spec.prompt_tokens + generated.get(request, 0)
        peak = max(peak, held + more * number)
    return peak


def with_policy(policy: Callable[[], Policy]) -> Build:
    """A builder of baseline systems with this policy."""
    return lambda cluster, clock, ended: Direct(policy(), cluster, clock, ended)
