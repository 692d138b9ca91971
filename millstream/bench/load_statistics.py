"""Sums up a load's samples as one report: percentiles, rates, errors. Pure; times in seconds."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

UNFINISHED = "unfinished"  # still running when the drain was over


@dataclass(slots=True)
class Sample:
    """The record of one request of a load, as its client saw it. Times are seconds of one clock.

    `due` is when the request should have been sent, `sent` when it was. The time to first token and
    the whole time count from `due`, since a client that falls behind must not make the server look
    good. `accepted` and `request_id` are set only where the protocol confirms that a request was
    accepted. `times` and `counts` have the arrival and the number of tokens of each chunk. `ended`
    is None while the request runs. `code` is the error code of a failed request, else empty.
    `timing` has the milliseconds that the gateway reports for each stage.
    """

    due: float
    sent: float = 0.0
    accepted: float | None = None
    request_id: str = ""
    ended: float | None = None
    code: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    attempts: int = 1
    times: "array[float]" = field(default_factory=lambda: array("d"))
    counts: "array[int]" = field(default_factory=lambda: array("I"))
    timing: Mapping[str, float] = field(default_factory=dict)

    def add_chunk(self, now: float, count: int) -> None:
        """Record a chunk of `count` tokens that arrived at `now`, in seconds of the clock."""
        self.times.append(now)
        self.counts.append(count)
        self.tokens += count

    def spread_tokens(self, tokens: int) -> None:
        """Set the counts of all recorded chunks so that `tokens` are spread evenly over them.

        Meant for a protocol that reports only the total, at the end. `tokens` replaces the total
        recorded so far, too.
        """
        chunks = len(self.counts)
        self.tokens = tokens
        self.counts = array(
            "I", ((i + 1) * tokens // chunks - i * tokens // chunks for i in range(chunks))
        )

    def finish(self, now: float, code: str = "") -> None:
        """Record that the request ended at `now`, in seconds of the clock.

        `code` is the error code with which it failed; an empty one means that it succeeded.
        """
        self.ended, self.code = now, code

    @property
    def is_ok(self) -> bool:
        """True if the request has ended without an error; False while it runs or if it failed."""
        return self.ended is not None and not self.code

    def gaps(self) -> Iterable[float]:
        """Yield the seconds from each chunk to the next; there are none for a single chunk."""
        return (later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of `count` measured values; the other fields are in the values' unit.

    In a `LoadReport` that unit is milliseconds. `p50`, `p95` and `p99` are percentiles.
    """

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The results of one load.

    `completed` counts the requests that ended without an error; latencies and stages are of these
    only. `errors` counts the others by error code. `seconds` is the length of the measured time;
    tokens and requests per second count what arrived or ended within it. In `latencies_ms`, names
    with `_since_sent` count from the sending of a request and describe the server alone. The others
    count from the time at which it was due and describe what a user would experience. `stages_ms`
    are the times that the gateway reports in `timing`. `later_attempts` counts workers' attempts
    after the first one at each request, which follow a failure.
    """

    seconds: float
    requests: int
    completed: int
    errors: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float
    requests_per_second: float
    tokens_per_chunk: float
    later_attempts: int
    latencies_ms: dict[str, Spread]
    stages_ms: dict[str, Spread]
    cpu_us_per_token: dict[str, float | None] = field(default_factory=dict)


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return the `q`-quantile (0..1) of a sorted, non-empty sequence, interpolated linearly."""
    position = q * (len(ordered) - 1)
    low, high = ordered[floor(position)], ordered[ceil(position)]
    return low + (high - low) * (position - floor(position))


def compute_spread(values: Iterable[float], scale: float = 1.0) -> Spread | None:
    """Return the distribution of `values`, each multiplied by `scale`; None if there are none."""
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return None
    p50, p95, p99 = (percentile(ordered, q) for q in (0.50, 0.95, 0.99))
    return Spread(len(ordered), sum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


def make_report(
    samples: Sequence[Sample], began: float, window: float | None, is_open: bool
) -> LoadReport:
    """Return the report of a load from `samples`, the records of its requests.

    `began` is the time of the load's start, in seconds of the samples' clock. `window` is the
    number of seconds to measure from then. With None the measured time lasts until the last request
    ended, since a load of a given number of requests has no other end. Latencies since sending are
    included only for an open loop (`is_open`), which sends each request at a set time.
    """
    good = [sample for sample in samples if sample.is_ok]
    last = max((sample.ended for sample in samples if sample.ended is not None), default=began)
    seconds = window or max(last - began, 1e-9)
    chunks = sum(len(sample.times) for sample in samples)
    tokens = sum(sample.tokens for sample in samples)
    return LoadReport(
        seconds=seconds,
        requests=len(samples),
        completed=len(good),
        errors=dict(Counter(sample.code for sample in samples if sample.code).most_common()),
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        output_tokens=tokens,
        tokens_per_second=_tokens_before(samples, began + seconds) / seconds,
        requests_per_second=_ended_before(good, began + seconds) / seconds,
        tokens_per_chunk=tokens / chunks if chunks else 0.0,
        later_attempts=sum(sample.attempts - 1 for sample in samples),
        latencies_ms=_latencies(good, is_open),
        stages_ms=_stages(good),
    )


def _tokens_before(samples: Iterable[Sample], end: float) -> int:
    return sum(
        count
        for sample in samples
        for time, count in zip(sample.times, sample.counts, strict=True)
        if time <= end
    )


def _ended_before(samples: Iterable[Sample], end: float) -> int:
    return sum(1 for sample in samples if sample.ended is not None and sample.ended <= end)


def _latencies(good: Sequence[Sample], is_open: bool) -> dict[str, Spread]:
    with_output = [sample for sample in good if sample.times]
    ended = [(sample, sample.ended) for sample in good if sample.ended is not None]
    measures = {
        "ttft": compute_spread((sample.times[0] - sample.due for sample in with_output), 1000),
        "ttft_since_sent": compute_spread(
            (sample.times[0] - sample.sent for sample in with_output), 1000
        ),
        "inter_token": compute_spread(
            (gap for sample in with_output for gap in sample.gaps()), 1000
        ),
        "end_to_end": compute_spread((end - sample.due for sample, end in ended), 1000),
        "end_to_end_since_sent": compute_spread((end - sample.sent for sample, end in ended), 1000),
    }
    return {
        name: measure
        for name, measure in measures.items()
        if measure and (is_open or not name.endswith("_since_sent"))
    }


def _stages(good: Iterable[Sample]) -> dict[str, Spread]:
    stages: defaultdict[str, list[float]] = defaultdict(list)
    for sample in good:
        for stage, ms in sample.timing.items():
            stages[stage].append(ms)
    return {
        stage: measure for stage, values in stages.items() if (measure := compute_spread(values))
    }


@dataclass
class Tally:
    """The counts of a load's ended requests and of their tokens so far, for a progress bar.

    `done` counts requests that succeeded, `failed` the others.
    """

    done: int = 0
    failed: int = 0
    tokens: int = 0

    def add(self, sample: Sample) -> None:
        """Add a request that has ended to `done` or `failed`, and its tokens to `tokens`."""
        self.done += sample.is_ok
        self.failed += not sample.is_ok
        self.tokens += sample.tokens
