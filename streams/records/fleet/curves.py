"""Curves: what a machine of a type does with a model version, as it was measured. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf, isfinite
from typing import Any, Self

from streams import messages
from streams.records.cas.cas_record import CasRecord
from streams.records.fleet.step_times import CapacityGoals, RequestShape, StepTimes


class CurveSource(StrEnum):
    """The origin of a curve."""

    BENCH = "bench"  # `millstream bench --curve`
    FILE = "file"
    LIVE = "live"  # learnt from workers at their work


@dataclass(frozen=True)
class CurvePoint:
    """One measured setting: a full batch of like requests on one worker, means of seconds."""

    batch: int
    prompt_tokens: float
    output_tokens: float
    first_token_seconds: float
    token_seconds: float
    requests_per_second: float


@dataclass(frozen=True)
class Capacity:
    """The performance of one worker with requests of one shape at one size of the batch.

    The seconds are means in a full batch; waiting for a place in it is not in them.
    """

    batch: int
    shape: RequestShape
    request_seconds: float
    first_token_seconds: float
    token_seconds: float

    @property
    def requests_per_second(self) -> float:
        """Requests that end in a second, while the batch is full."""
        return self.batch / self.request_seconds

    @property
    def prompt_tokens_per_second(self) -> float:
        """Tokens of prompts in a second, while the batch is full."""
        return self.requests_per_second * self.shape.prompt_tokens

    @property
    def output_tokens_per_second(self) -> float:
        """Generated tokens in a second, while the batch is full."""
        return self.requests_per_second * self.shape.output_tokens


@dataclass(frozen=True)
class Curve(CasRecord):
    """Throughput and latency of one model version on one machine type, by batch and lengths.

    `times` follow from the measured `points`. `max_sequences` and `kv_tokens` are what the worker
    took at once. `load_seconds` is the time from the start of a load to an engine that has warmed
    up, of which `warm_up_seconds` are the latter. `weight_bytes` and `kv_bytes_per_token` are
    memory; 0 where an engine has none. None: nobody has measured it. `measured_at` is in epoch
    seconds.

    `live_factor` is by how much longer than measured requests take on workers at their work; it is
    in `times` already.
    """

    model: str
    version: str
    type: str
    source: CurveSource
    measured_at: float
    times: StepTimes
    max_sequences: int
    kv_tokens: int
    load_seconds: float | None = None
    warm_up_seconds: float | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    live_factor: float = 1.0
    points: list[CurvePoint] = field(default_factory=list)

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the curve that `pack` encoded; raises ValueError or TypeError for other bytes."""
        return cls.from_map(messages.unpack(data), revision)

    @classmethod
    def from_map(cls, wire: Mapping[str, Any], revision: int = 0) -> Self:
        """Return the curve of a map with its fields; raises ValueError, TypeError or KeyError."""
        times = messages.from_wire(StepTimes, wire["times"])
        points = [messages.from_wire(CurvePoint, each) for each in wire.get("points", ())]
        facts = {
            **wire,
            "times": times,
            "points": points,
            "source": CurveSource(wire["source"]),
            "revision": revision,
        }
        return messages.from_wire(cls, facts)

    def __post_init__(self) -> None:
        """Raise ValueError, with its name, for a number that no machine has."""
        for name, value in self._numbers():
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value!r}: it is 0 or more")
        if not self.times.step_seconds + self.times.sequence_seconds > 0:
            raise ValueError("times: a step takes no time; step_seconds or sequence_seconds is > 0")
        for name in ("max_sequences", "kv_tokens"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it is 1 or more")
        for point in self.points:
            if not all(each > 0 for each in vars(point).values()):
                raise ValueError(f"points: {vars(point)}: all of a point's numbers are above 0")

    def _numbers(self) -> Iterator[tuple[str, float]]:
        """Yield each number but the counts, with its name."""
        yield from ((f"times.{name}", value) for name, value in vars(self.times).items())
        for name in ("load_seconds", "warm_up_seconds", "weight_bytes", "kv_bytes_per_token"):
            if (value := getattr(self, name)) is not None:
                yield name, value
        for point in self.points:
            yield from ((f"points: {name}", value) for name, value in vars(point).items())

    @property
    def name(self) -> str:
        """Name of the curve for operators: `TYPE/MODEL@VERSION`."""
        return f"{self.type}/{self.model}@{self.version}"

    @property
    def usual_shape(self) -> RequestShape | None:
        """The requests of the first point that was measured; None where none was."""
        if not self.points:
            return None
        return RequestShape(self.points[0].prompt_tokens, self.points[0].output_tokens)

    def corrected(self, factor: float, now: float) -> Self:
        """Return the curve as workers at their work told it at `now`: all times times `factor`."""
        return replace(
            self,
            source=CurveSource.LIVE,
            measured_at=now,
            times=self.times.scaled(factor),
            live_factor=factor,
        )

    def max_batch(self, shape: RequestShape, memory: int | None = None) -> int:
        """Return how many requests of a shape fit at once on one machine; 0 if not even one does.

        Memory is that of the worker that was measured, or `memory` in bytes.
        """
        kv_tokens: float = self.kv_tokens
        if memory is not None and self.kv_bytes_per_token:
            kv_tokens = (memory - (self.weight_bytes or 0)) / self.kv_bytes_per_token
        return max(0, min(self.max_sequences, int(kv_tokens // shape.tokens)))

    def capacity(
        self, shape: RequestShape, goals: CapacityGoals, memory: int | None = None
    ) -> Capacity | None:
        """Return what a machine does with the largest batch that keeps the goals and fits memory.

        None if not even a single request keeps them, or fits. A larger batch does more and takes
        longer, so none that keeps the goals does more.
        """
        least, most = 0, self.max_batch(shape, memory)
        while least < most:  # `least` keeps the goals, unless it is 0
            batch = (least + most + 1) // 2
            if _keeps(self.capacity_at(batch, shape), goals):
                least = batch
            else:
                most = batch - 1
        return self.capacity_at(least, shape) if least else None

    def capacity_at(self, batch: int, shape: RequestShape) -> Capacity:
        """Return what a machine does with a batch of this size, whatever it has memory for."""
        times = self.times
        return Capacity(
            batch,
            shape,
            times.request_seconds(batch, shape),
            times.first_token_seconds(batch, shape),
            times.token_seconds(batch, shape),
        )


def _keeps(capacity: Capacity, goals: CapacityGoals) -> bool:
    first = inf if goals.first_token_seconds is None else goals.first_token_seconds
    each = inf if goals.token_seconds is None else goals.token_seconds
    return capacity.first_token_seconds <= first and capacity.token_seconds <= each
