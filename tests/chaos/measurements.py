"""The figures of a history: what its clients noticed. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from math import inf
from statistics import linear_regression

from streams.topology import LOG_SECONDS
from tests.chaos.checker import MIB
from tests.chaos.history import FaultInjected, MemorySample
from tests.chaos.indexed_history import IndexedHistory, ObservedRequest

WARM_SECONDS = LOG_SECONDS  # of a process that has begun: what it keeps of logs is full then
SAME_INJECTION_SECONDS = 1.0  # so far apart is what one strike does to several
GROWTH_SECONDS = 600.0  # less than this tells nothing of an hour


@dataclass(frozen=True)
class InjectionImpact:
    """Seconds that clients waited after a strike and before the next one.

    `silence` is the longest wait of a stream for something new: from its promise to its first
    token, between two chunks, to its end. `kept_out` is the longest wait for a promise.
    """

    deed: str
    whom: str
    silence_p50: float
    silence_p99: float
    silence_max: float
    kept_out: float


@dataclass(frozen=True)
class Measurements:
    """Seconds; a stream's gap is its longest pause between two chunks.

    Times are without those of producers, who ask again for what they miss only now and then. Gaps
    are of the streams that ran when something struck (all, if nothing did), without those of
    clients that were told how to read, and `moved` those that another attempt went on with.
    `accept` is from the first try to the promise over all tries, so its most is how long new
    requests were kept out; `first` from the promise to the first token. `growth` is in MiB an hour,
    of each process that ran for long enough. `felt` tells strikes apart.
    """

    streams: int
    right: int
    refusals: int
    struck: int
    moved: int
    gap_p50: float
    gap_p99: float
    gap_max: float
    accept_p50: float
    accept_max: float
    first_p50: float
    first_max: float
    growth: dict[str, float] = field(default_factory=dict)
    felt: list[InjectionImpact] = field(default_factory=list)


def measure(story: IndexedHistory) -> Measurements:
    """Raises nothing: where nothing was seen, a figure is 0."""
    streams = list(story.requests.values())
    asked = [stream for stream in streams if not stream.submitted.route]
    struck = [stream for stream in asked if _ran_at_a_strike(stream, story)]
    gaps = [_gap(stream) for stream in struck]
    accepts = [s.accepted[0].at - s.submitted.at for s in asked if s.accepted]
    firsts = [s.chunks[0].at - s.accepted[0].at for s in asked if s.chunks and s.accepted]
    return Measurements(
        streams=len(streams),
        right=sum(stream.is_right for stream in streams),
        refusals=sum(len(stream.refused) for stream in streams),
        struck=len(struck),
        moved=sum(any(s.attempt > 1 for s in stream.started) for stream in streams),
        gap_p50=quantile(gaps, 0.5),
        gap_p99=quantile(gaps, 0.99),
        gap_max=quantile(gaps, 1.0),
        accept_p50=quantile(accepts, 0.5),
        accept_max=quantile(accepts, 1.0),
        first_p50=quantile(firsts, 0.5),
        first_max=quantile(firsts, 1.0),
        growth=dict(_growth(story)),
        felt=list(_felt(story)),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0


def _growth(story: IndexedHistory) -> Iterator[tuple[str, float]]:
    """Least squares over the resident bytes of each process once it is warm."""
    samples = defaultdict[tuple[str, int], list[MemorySample]](list)
    for sample in story.all(MemorySample):
        samples[sample.process, sample.pid].append(sample)
    for (process, _), all_of in samples.items():
        warm = [sample for sample in all_of if sample.at >= all_of[0].at + WARM_SECONDS]
        if warm and warm[-1].at - warm[0].at >= GROWTH_SECONDS:
            slope = linear_regression([s.at for s in warm], [s.rss for s in warm]).slope
            yield process, round(slope * 3600 / MIB, 1)


def _felt(story: IndexedHistory) -> Iterator[InjectionImpact]:
    asked = [s for s in story.requests.values() if not s.submitted.route]
    streams = [s for s in asked if s.submitted.client not in story.readers]
    strikes = list(_together(story))
    for strike, following in zip_longest(strikes, strikes[1:]):
        between = strike[0].at, following[0].at if following else inf
        silences = [s for stream in streams if (s := _pause(_heard(stream), *between))]
        tries = [[s.submitted.at, s.accepted[0].at] for s in streams if s.accepted]
        yield InjectionImpact(
            deed=strike[0].action,
            whom=" ".join(each.target for each in strike),
            silence_p50=quantile(silences, 0.5),
            silence_p99=quantile(silences, 0.99),
            silence_max=quantile(silences, 1.0),
            kept_out=quantile([_pause(each, *between) for each in tries], 1.0),
        )


def _together(story: IndexedHistory) -> Iterator[list[FaultInjected]]:
    """What was done to several at once is one strike; what readers are told is none."""
    strike = list[FaultInjected]()
    for struck in story.injections:
        if struck.undone or struck.target in story.readers:
            continue
        if strike and struck.at - strike[0].at > SAME_INJECTION_SECONDS:
            yield strike
            strike = []
        strike.append(struck)
    if strike:
        yield strike


def _heard(stream: ObservedRequest) -> list[float]:
    """When it heard of its fleet."""
    accepted = [each.at for each in stream.accepted[:1]]
    return accepted + [each.at for each in stream.chunks] + [each.at for each in stream.ended]


def _pause(times: Sequence[float], begin: float, end: float) -> float:
    """The longest between two times that lies, or as far as it does, between `begin` and `end`."""
    within = (min(b, end) - max(a, begin) for a, b in pairwise(times))
    return max((0.0, *within))


def _gap(stream: ObservedRequest) -> float:
    return max((b.at - a.at for a, b in pairwise(stream.chunks)), default=0.0)


def _ran_at_a_strike(stream: ObservedRequest, story: IndexedHistory) -> bool:
    if not stream.accepted or not stream.ended or stream.submitted.client in story.readers:
        return False
    begun, ended = stream.accepted[0].at, stream.ended[0].at
    return not story.injections or any(begun <= strike.at <= ended for strike in story.injections)
