"""A fleet on the virtual clock: machines boot, pull from one queue a model, drain, and are paid."""

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from bench.simulation.virtual_clock import VirtualClock
from gpu_worker.compute_meter import ComputeMeter
from simulation.engine import SimulatedEngine
from simulation.request import RequestSpec, SimulatedRequest
from simulation.step_model import StepModel
from streams.records.fleet.machine_types import MachineType

DECIDE_SECONDS = 1.0
GOAL_SECONDS = 10.0


@dataclass(frozen=True)
class ModelArrival:
    """A request for a model, with the milliseconds of a machine that it is expected to take."""

    model: str
    spec: RequestSpec
    work: float


@dataclass
class SimulatedMachine:
    """A machine of a type for a model; it is paid from `created_at` to `ended_at`.

    The meter, if it has one, is that of real workers; to it, its boot is a load, while `booting`
    is open.
    """

    id: str
    kind: MachineType
    model: str
    created_at: float
    engine: SimulatedEngine
    meter: ComputeMeter | None
    booting: ExitStack
    joined_at: float | None = None
    ended_at: float | None = None
    is_draining: bool = False
    is_stepping: bool = False
    reserved: int = 0  # KV tokens of what it holds
    held: dict[str, SimulatedRequest] = field(default_factory=dict)

    @property
    def serves(self) -> bool:
        """True while it takes requests."""
        return self.joined_at is not None and not self.is_draining

    def fits(self, spec: RequestSpec) -> bool:
        """Return True if it can take a request beside what it holds."""
        model = self.engine.model
        is_place = len(self.held) < model.max_sequences
        return is_place and self.reserved + spec.cost <= model.kv_tokens


@dataclass
class ModelLoad:
    """One model's queue, and what has arrived and was refused so far, as (time, work)."""

    queue: deque[tuple[SimulatedRequest, float]] = field(default_factory=deque)
    queued_work: float = 0.0
    accepted: list[tuple[float, float]] = field(default_factory=list)
    refused: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class SpentMoney:
    """Money spent on machines: price of an hour times nanoseconds, summed without rounding.

    `lost` was computed for requests that had not ended when their machine did.
    """

    requests: int = 0
    idle: int = 0
    boot: int = 0
    lost: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.requests + self.idle + self.boot + self.lost


class Scaler(Protocol):
    """Decides once a second how many machines there are."""

    def decide(self, fleet: "SimulatedFleet", now: float) -> None:
        """Start and end machines of the fleet."""


class SimulatedFleet:
    """Machines of several types for several models, with arrivals that are known in advance.

    A request is refused if what waits before it would take the machines that serve longer than the
    goal. `capacities` are what a machine does of expected work in a second, by model and type.
    With `is_metered`, machines are metered for `money`, which takes as long as all else.
    """

    def __init__(
        self,
        kinds: Mapping[str, tuple[MachineType, StepModel]],
        capacities: Mapping[tuple[str, str], float],
        arrivals: Sequence[ModelArrival],
        *,
        is_metered: bool = False,
    ) -> None:
        self._is_metered = is_metered
        self.kinds, self.capacities, self.arrivals = kinds, capacities, arrivals
        self.clock = VirtualClock()
        self.machines: dict[str, SimulatedMachine] = {}  # that are not over
        self.over: list[SimulatedMachine] = []
        self.money = SpentMoney()
        self.loads = defaultdict[str, ModelLoad](ModelLoad)
        self.requests: list[SimulatedRequest] = []
        self.changes: list[tuple[float, str, int]] = []  # (time, model, +1 or -1)
        self._numbers = itertools.count()

    def run(self, scaler: Scaler, seconds: float, first: Mapping[str, Mapping[str, int]]) -> None:
        """Run the arrivals of so many seconds, beginning with machines that have booted.

        `first` counts them by model and type. What runs at the end is ended.
        """
        for model, counts in first.items():
            for kind, count in counts.items():
                for _ in range(count):
                    self._join(self._create(kind, model))
        self._schedule(0)
        self.clock.call_every(DECIDE_SECONDS, lambda: scaler.decide(self, self.clock.now))
        self.clock.run(seconds)
        self.clock.now = seconds
        for machine in list(self.machines.values()):
            self._finish(machine, seconds)

    def start(self, kind: str, model: str) -> str:
        """Order a machine, which serves after its boot time; return its id."""
        machine = self._create(kind, model)
        self.changes.append((self.clock.now, model, 1))
        self.clock.call_later(machine.kind.boot_seconds, partial(self._join, machine))
        return machine.id

    def end(self, name: str) -> None:
        """Drain a machine: it finishes what it holds, and is paid until then."""
        machine = self.machines[name]
        if machine.is_draining:
            return
        machine.is_draining = True
        self.changes.append((self.clock.now, machine.model, -1))
        self._end_if_done(machine)

    def wanted(self, model: str) -> list[SimulatedMachine]:
        """Return the machines of a model that are there or come, the oldest first."""
        return [m for m in self.machines.values() if m.model == model and not m.is_draining]

    def cost(self) -> int:
        """Return the price of an hour times nanoseconds, for all machines that are over."""
        return sum(
            machine.kind.price_per_hour * (to_ns(machine.ended_at) - to_ns(machine.created_at))
            for machine in self.over
            if machine.ended_at is not None
        )

    def attainment(self) -> float:
        """Return the share of all arrivals that had their first token within the goal."""
        kept = sum(r.ttft is not None and r.ttft <= GOAL_SECONDS for r in self.requests)
        return kept / len(self.requests)

    # Requests

    def _schedule(self, index: int) -> None:
        if index < len(self.arrivals):
            self.clock.call_at(self.arrivals[index].spec.at, partial(self._arrive, index))

    def _arrive(self, index: int) -> None:
        arrival = self.arrivals[index]
        request = SimulatedRequest(arrival.spec, f"r{index}")
        self.requests.append(request)
        load = self.loads[arrival.model]
        told = self.clock.now, arrival.work
        if self._would_wait(arrival.model) > GOAL_SECONDS:
            load.refused.append(told)
        else:
            load.accepted.append(told)
            load.queue.append((request, arrival.work))
            load.queued_work += arrival.work
            self._serve(arrival.model)
        self._schedule(index + 1)

    def _would_wait(self, model: str) -> float:
        """Seconds that what waits takes the machines that serve, or are about to."""
        pace = sum(
            self.capacities[model, machine.kind.name]
            for machine in self.wanted(model)
            if machine.serves
        )
        return self.loads[model].queued_work / pace if pace else 0.0

    def _serve(self, model: str) -> None:
        """Let the machines with most room take what waits, in order."""
        load = self.loads[model]
        machines = [machine for machine in self.wanted(model) if machine.serves]
        while load.queue:
            spec = load.queue[0][0].spec
            free = [machine for machine in machines if machine.fits(spec)]
            if not free:
                return
            machine = min(free, key=lambda each: each.reserved)
            self._take(machine, load)

    def _take(self, machine: SimulatedMachine, load: ModelLoad) -> None:
        request, work = load.queue.popleft()
        load.queued_work -= work
        machine.held[request.request_id] = request
        machine.reserved += request.spec.cost
        machine.engine.add(request)
        if not machine.is_stepping:
            self._begin_step(machine)

    def _begin_step(self, machine: SimulatedMachine) -> None:
        seconds = machine.engine.begin_step()
        machine.is_stepping = seconds is not None
        if seconds is not None:
            if machine.meter:
                machine.meter.begin_step(machine.model)
            self.clock.call_later(seconds, partial(self._finish_step, machine))

    def _finish_step(self, machine: SimulatedMachine) -> None:
        result = machine.engine.finish_step()
        if machine.meter:
            machine.meter.end_step(machine.model, dict.fromkeys(machine.held, 1))
        for request in result.first:
            request.first = self.clock.now
        for request in result.ended:
            request.ended = self.clock.now
            machine.reserved -= request.spec.cost
            del machine.held[request.request_id]
            if machine.meter:
                spent = machine.meter.take(machine.model, request.request_id)
                self.money.requests += spent * machine.kind.price_per_hour
        if result.ended:
            self._serve(machine.model)
        if not machine.engine.idle:
            self._begin_step(machine)
        else:
            machine.is_stepping = False
            self._end_if_done(machine)

    # Machines

    def _create(self, kind: str, model: str) -> SimulatedMachine:
        record, steps = self.kinds[kind]
        name, engine, booting = f"m-{next(self._numbers)}", SimulatedEngine(steps), ExitStack()
        meter = None
        if self._is_metered:
            meter = ComputeMeter([model], self._now_ns(), self._now_ns)
            booting.enter_context(meter.loading(model))
        machine = SimulatedMachine(name, record, model, self.clock.now, engine, meter, booting)
        self.machines[name] = machine
        return machine

    def _join(self, machine: SimulatedMachine) -> None:
        if machine.ended_at is None:
            machine.joined_at = self.clock.now
            machine.booting.close()
            self._serve(machine.model)

    def _end_if_done(self, machine: SimulatedMachine) -> None:
        if machine.is_draining and not machine.held:
            self._finish(machine, self.clock.now)

    def _finish(self, machine: SimulatedMachine, now: float) -> None:
        if machine.ended_at is None:
            machine.ended_at = now
            machine.booting.close()
            del self.machines[machine.id]
            self.over.append(machine)
            if machine.meter:
                self._pay(machine, machine.meter)

    def _pay(self, machine: SimulatedMachine, meter: ComputeMeter) -> None:
        """Divide what a machine has cost by its meter."""
        times = meter.report(is_last=True)[machine.model]
        price = machine.kind.price_per_hour
        self.money.idle += times.idle * price
        self.money.boot += times.load * price
        self.money.lost += times.lost * price

    def _now_ns(self) -> int:
        return to_ns(self.clock.now)


def to_ns(seconds: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(seconds * 1e9)
