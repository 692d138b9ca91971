"""The systems that are compared: Millstream, and a queue of some policy in front of the engines."""

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

TAKE_STEPS = 10  # after which VTC's server looks again whether there is room
Ended = Callable[[SimulatedRequest], None]


@dataclass(frozen=True)
class SimulatedCluster:
    """What every system of a comparison gets: workers, and how fast each is."""

    workers: tuple[StepModel, ...] = (StepModel(),)
    gateways: int = 1
    weights: Mapping[str, float] = field(default_factory=dict)
    caches_prefixes: bool = False
    delays: Delays = field(default_factory=Delays)

    def engines(self) -> list[SimulatedEngine]:
        return [SimulatedEngine(model, self._prefixes(model)) for model in self.workers]

    def _prefixes(self, model: StepModel) -> PrefixCacheModel | None:
        return PrefixCacheModel(model.kv_tokens) if self.caches_prefixes else None


class System(Protocol):
    """Takes requests; calls `ended` once for each of them, whatever becomes of it."""

    engines: list[SimulatedEngine]

    def submit(self, asked: RequestSpec) -> SimulatedRequest: ...


Build = Callable[[SimulatedCluster, VirtualClock, Ended], System]


class Millstream:
    """Gateways, a leader and workers."""

    def __init__(self, plant: SimulatedCluster, clock: VirtualClock, ended: Ended) -> None:
        self._clock, self._delays, self._ended = clock, plant.delays, ended
        self.engines = plant.engines()
        self._numbers = itertools.count()
        self._gateways = [SimulatedGateway(clock) for _ in range(plant.gateways)]
        pool = WorkStream(clock, plant.delays)
        self.leader = SimulatedLeader(
            clock, plant.delays, pool, plant.weights, self._told, self._over
        )
        listeners = Listeners(self.leader.receive_heartbeat, self._first, self._left)
        for number, engine in enumerate(self.engines):
            SimulatedWorker(f"w{number}", engine, pool, clock, plant.delays, listeners).start()
        self.leader.start()

    def submit(self, asked: RequestSpec) -> SimulatedRequest:
        fate = SimulatedRequest(asked, f"r{next(self._numbers)}")
        if not self._gateways[asked.gateway % len(self._gateways)].try_admit(fate):
            self._over(fate, fate.code)
            return fate
        fate.accepted = self._clock.now
        arrival = self._delays.store + self._delays.hop
        self._clock.call_later(arrival, lambda: self.leader.enqueue(fate))
        return fate

    def _told(self, pressure: Pressure) -> None:
        def hear() -> None:
            for gateway in self._gateways:
                gateway.receive_pressure(pressure)

        self._clock.call_later(self._delays.hop, hear)

    def _first(self, fate: SimulatedRequest) -> None:
        fate.first = self._clock.now

    def _left(self, fate: SimulatedRequest, code: str) -> None:
        """A worker has stored the terminal, and the ledger's record is on its way."""
        self._clock.call_later(self._delays.hop, lambda: self._over(fate, code))
        ledger = self._delays.store + self._delays.hop
        self._clock.call_later(ledger, lambda: self.leader.settle(fate))

    def _over(self, fate: SimulatedRequest, code: str) -> None:
        fate.ended, fate.code = self._clock.now, code
        self._ended(fate)


class Direct:
    """One queue, from whose head engines take what fits: when one of theirs ends, or soon after.

    A request joins a batch if the KV would hold until all of it has ended, as VTC's server judges.
    What has missed its deadline is run all the same, since nobody tells it.
    """

    def __init__(
        self, policy: Policy, plant: SimulatedCluster, clock: VirtualClock, ended: Ended
    ) -> None:
        self._policy = policy
        self.engines = plant.engines()
        self._clock, self._ended = clock, ended
        self._numbers = itertools.count()
        self._stepping: set[int] = set()
        self._batches: list[dict[str, SimulatedRequest]] = [{} for _ in self.engines]
        clock.call_every(plant.delays.tell, lambda: policy.tick(clock.now))

    def submit(self, asked: RequestSpec) -> SimulatedRequest:
        fate = SimulatedRequest(asked, f"r{next(self._numbers)}")
        if not self._policy.admits(fate):
            fate.ended, fate.code = self._clock.now, "overloaded"
            self._ended(fate)
            return fate
        fate.accepted = self._clock.now
        self._policy.push(fate)
        for number in range(len(self.engines)):
            if number not in self._stepping:
                self._take(number)
                self._step(number)
        return fate

    def _take(self, number: int) -> None:
        engine = self.engines[number]
        generated = dict(engine.progress())
        for running, tokens in generated.items():
            self._policy.progress(running, tokens)
        while (fate := self._policy.head()) and self._fits(number, fate, generated):
            self._policy.pop()
            fate.started, fate.worker = self._clock.now, f"w{number}"
            self._batches[number][fate.request_id] = fate
            engine.add(fate)

    def _fits(
        self, number: int, fate: SimulatedRequest, generated: Mapping[SimulatedRequest, int]
    ) -> bool:
        model, batch = self.engines[number].model, self._batches[number]
        if len(batch) >= model.max_sequences:
            return False
        return peak_tokens([*batch.values(), fate], generated) <= model.kv_tokens

    def _step(self, number: int) -> None:
        seconds = self.engines[number].begin_step()
        if seconds is not None:
            self._stepping.add(number)
            self._clock.call_later(seconds, lambda: self._stepped(number))

    def _stepped(self, number: int) -> None:
        self._stepping.discard(number)
        engine = self.engines[number]
        stepped = engine.finish_step()
        for fate in stepped.first:
            fate.first = self._clock.now
        for fate in stepped.ended:
            self._leave(number, fate)
        if stepped.ended or engine.steps % TAKE_STEPS == 0:
            self._take(number)
        self._step(number)

    def _leave(self, number: int, fate: SimulatedRequest) -> None:
        del self._batches[number][fate.request_id]
        fate.ended = self._clock.now
        fate.code = "deadline_exceeded" if fate.ended > fate.deadline else ""
        self._policy.progress(fate, fate.generated)
        self._ended(fate)


def peak_tokens(batch: list[SimulatedRequest], generated: Mapping[SimulatedRequest, int]) -> int:
    """The most KV tokens that a batch will come to hold, as each of it ends at its reserve.

    When one ends, those that go on have each grown by what was left to it: `_can_add_new_req` of
    S-LoRA (Sheng et al., MLSys 2024).
    """
    left = [(fate.spec.reserve - generated.get(fate, 0), fate) for fate in batch]
    left.sort(key=lambda entry: -entry[0])
    held = peak = 0
    for number, (more, fate) in enumerate(left, 1):
        held += fate.spec.prompt_tokens + generated.get(fate, 0)
        peak = max(peak, held + more * number)
    return peak


def with_policy(policy: Callable[[], Policy]) -> Build:
    """The system of a policy."""
    return lambda plant, clock, ended: Direct(policy(), plant, clock, ended)
