"""Divides all time of a worker over requests, loading, and waiting; exact in nanoseconds."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ComputeTimes:
    """Nanoseconds of a worker that belong to one model.

    `elapsed` has `idle`, `load` and the time of all steps; `lost` is the part of these that was
    given to requests and is in no record of one.
    """

    elapsed: int
    idle: int
    load: int
    lost: int


@dataclass
class _ModelTime:
    """One model's time since the last report; `undivided` and `shares` are of any age.

    A model that `is_retired` is served no longer.
    """

    is_retired: bool = False
    idle: int = 0
    load: int = 0
    steps: int = 0
    lost: int = 0
    undivided: int = 0  # of steps, not given to requests yet
    shares: dict[str, int] = field(default_factory=dict)  # by request id


class ComputeMeter:
    """All time of one worker since `started`, and what it was used for.

    Each moment belongs to the models whose engines are in a step, in equal parts; while there are
    none, to those that are being loaded, and else to all of them as idle time. The time of a step
    is divided by the tokens that each request had in it. What is left over of a division is carried
    to the model's next step, and so is a step without tokens. Nothing is rounded, so that the parts
    are together the time that has passed. While there are no models, the time waits for the next
    one. `clock` and `started` are nanoseconds. Safe to use from any thread.
    """

    def __init__(
        self,
        models: Iterable[str],
        started: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._times = {name: _ModelTime() for name in models}
        self._clock, self._counted_until = clock, started
        self._in_step: list[_ModelTime] = []
        self._loading: list[_ModelTime] = []
        self._lock = threading.Lock()  # engines' threads add, the event loop takes

    def of_model(self, model: str) -> "ModelMeter":
        """Return the meter of one model, with which its steps are counted."""
        return ModelMeter(self, model)

    def add(self, model: str) -> None:
        """Count idle time for this model, too, from now on. Idempotent."""
        with self._lock:
            self._count()
            self._times.setdefault(model, _ModelTime()).is_retired = False

    def retire(self, model: str) -> None:
        """Count nothing more for a model; the next report is its last."""
        with self._lock:
            self._count()
            self._times[model].is_retired = True

    def begin_step(self, model: str) -> None:
        """Count time for a model's step from now on."""
        with self._lock:
            self._count()
            self._in_step.append(self._times[model])

    def end_step(self, model: str, tokens: Mapping[str, int]) -> None:
        """Divide the time of a model's step by the tokens that each request had in it."""
        found, total = self._times[model], sum(tokens.values())
        with self._lock:
            self._count()
            self._in_step.remove(found)
            if not total:
                return
            shares, whole = found.shares, found.undivided
            for request_id, count in tokens.items():
                share = whole * count // total
                shares[request_id] = shares.get(request_id, 0) + share
                found.undivided -= share

    @contextmanager
    def loading(self, model: str) -> Iterator[None]:
        """Count the time of a `with` block as a load of the model, while no engine is in a step."""
        found = self._times[model]
        with self._lock:
            self._count()
            self._loading.append(found)
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._loading.remove(found)

    def take(self, model: str, request_id: str) -> int:
        """Return a request's time since it was last taken; the caller has it recorded."""
        with self._lock:
            found = self._times.get(model)
            return found.shares.pop(request_id, 0) if found else 0

    def lose(self, model: str, time: int) -> None:
        """Count time that was taken as lost: no record has it."""
        with self._lock:
            if found := self._times.get(model):
                found.lost += time

    def report(self, is_last: bool = False) -> dict[str, ComputeTimes]:
        """Return the times of all models since the last report, by name.

        In the last one, what requests have not taken is lost.
        """
        with self._lock:
            self._count()
            found = {
                name: _report(each, is_last or each.is_retired)
                for name, each in self._times.items()
            }
            self._times = {k: each for k, each in self._times.items() if not each.is_retired}
            return found

    def _count(self) -> None:
        """Give the time since this was last called to those to whom it belongs."""
        serving = [each for each in self._times.values() if not each.is_retired]
        if not (self._in_step or self._loading or serving):
            return
        now = max(self._clock(), self._counted_until)
        passed, self._counted_until = now - self._counted_until, now
        if self._in_step:
            for each, part in _split(passed, self._in_step):
                each.steps += part
                each.undivided += part
        elif self._loading:
            for each, part in _split(passed, self._loading):
                each.load += part
        else:
            for each, part in _split(passed, serving):
                each.idle += part


class ModelMeter:
    """The part of a `ComputeMeter` that belongs to one model; see there for what methods do."""

    def __init__(self, meter: ComputeMeter, model: str) -> None:
        self._meter, self._model = meter, model

    def begin_step(self) -> None:
        """Count time for a step from now on."""
        self._meter.begin_step(self._model)

    def end_step(self, tokens: Mapping[str, int]) -> None:
        """Divide the time of the step by the tokens that each request had in it."""
        self._meter.end_step(self._model, tokens)

    def take(self, request_id: str) -> int:
        """Return a request's nanoseconds since they were last taken."""
        return self._meter.take(self._model, request_id)

    def lose(self, time: int) -> None:
        """Count nanoseconds that were taken as lost."""
        self._meter.lose(self._model, time)


def _split(time: int, parts: list[_ModelTime]) -> Iterator[tuple[_ModelTime, int]]:
    """Divide time evenly; the first parts get what is left over, a nanosecond each."""
    share, rest = divmod(time, len(parts))
    return ((each, share + (number < rest)) for number, each in enumerate(parts))


def _report(found: _ModelTime, is_last: bool) -> ComputeTimes:
    if is_last:
        found.lost += found.undivided + sum(found.shares.values())
        found.undivided, found.shares = 0, {}
    elapsed = found.idle + found.load + found.steps
    times = ComputeTimes(elapsed, found.idle, found.load, found.lost)
    found.idle = found.load = found.steps = found.lost = 0
    return times
