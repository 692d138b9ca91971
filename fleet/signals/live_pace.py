"""The pace of live workers by model version and machine type, from their heartbeats. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from streams.messages import Heartbeat
from streams.records.fleet.curves import Curve, CurveSource
from streams.records.fleet.step_times import RequestShape, StepTimes

MINUTE_SECONDS = 60.0
MIN_BUSY_SECONDS = 20.0  # of all workers of a pool together, in a minute that tells something
MIN_FACTOR, MAX_FACTOR = 0.5, 2.0  # by which a measured curve is corrected
MAX_GROWTH = 2  # a batch is taken to fit that is so many times as large as one that was seen
_MAX_GAP_SECONDS = 3.0  # between two heartbeats of a worker; after more of them, it was not heard
MAX_OBSERVED = 30  # minutes


class WorkerPool(NamedTuple):
    """The workers of a model version on a machine type."""

    model: str
    version: str
    type: str


@dataclass(frozen=True)
class ObservedPace:
    """A minute of a pool: mean requests at once on a busy worker, and seconds for each token.

    The seconds are those in which a request has a place on a worker, divided by its output tokens.
    """

    batch: float
    seconds_per_token: float
    max_sequences: int
    kv_tokens: int


class LivePace:
    """Adds up what the workers of one pool do, until a minute is full.

    `now` is epoch seconds.
    """

    def __init__(self, now: float) -> None:
        self._last: dict[str, tuple[Heartbeat, float]] = {}
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._began, self._tokens = now, 0
        self._request_seconds = self._busy_seconds = 0.0

    def add(self, beat: Heartbeat, now: float) -> None:
        """Take a heartbeat of a worker of the pool."""
        before, at = self._last.get(beat.worker, (beat, now))
        self._last[beat.worker] = beat, now
        tokens, seconds = beat.generated_tokens - before.generated_tokens, now - at
        if tokens >= 0 and seconds <= _MAX_GAP_SECONDS:
            self._tokens += tokens
            self._request_seconds += before.running * seconds
            self._busy_seconds += seconds if before.running else 0.0

    def close_minute(self, now: float) -> ObservedPace | None:
        """Return what the last minute has shown, and begin another; None if it is not over.

        It is over once it has lasted for a minute in which the workers were busy enough.
        """
        is_full = now - self._began >= MINUTE_SECONDS and self._busy_seconds >= MIN_BUSY_SECONDS
        if not is_full or not self._tokens:
            return None
        self._last = {k: (b, at) for k, (b, at) in self._last.items() if now - at < MINUTE_SECONDS}
        newest, _ = next(reversed(self._last.values()))
        observed = ObservedPace(
            self._request_seconds / self._busy_seconds,
            self._request_seconds / self._tokens,
            newest.max_sequences,
            newest.kv_tokens,
        )
        self._begin(now)
        return observed


def correction_factor(curve: Curve, shape: RequestShape, observed: ObservedPace) -> float:
    """Return by how much longer requests of a shape take than a measured curve says.

    It is bounded: beyond that, what was measured is another machine.
    """
    expected = curve.times.request_seconds(observed.batch, shape) / shape.output_tokens
    return min(MAX_FACTOR, max(MIN_FACTOR, observed.seconds_per_token / expected))


def learn_curve(pool: WorkerPool, paces: list[ObservedPace], now: float) -> Curve:
    """Return the curve of a pool that nobody has measured, from its minutes, the newest last.

    A token takes a time that grows with the batch, fitted to the minutes; what prompts take is in
    it. Batches beyond twice the largest one that was seen are not taken to fit.
    """
    recent = paces[-MAX_OBSERVED:]
    step, sequence = _fit_line([(each.batch, each.seconds_per_token) for each in recent])
    newest, largest = recent[-1], max(each.batch for each in recent)
    return Curve(
        *pool,
        source=CurveSource.LIVE,
        measured_at=now,
        times=StepTimes(step_seconds=step, sequence_seconds=sequence),
        max_sequences=max(1, min(newest.max_sequences, int(MAX_GROWTH * largest))),
        kv_tokens=max(1, newest.kv_tokens),
    )


def _fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return start and slope, neither negative, of the line nearest to the points."""
    count = len(points)
    mean_x, mean_y = (sum(values) / count for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = min(max(0.0, slope), mean_y / mean_x)
    return max(0.0, mean_y - slope * mean_x), slope
