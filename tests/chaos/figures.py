"""The figures of a history: what its clients noticed. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import linear_regression

from streams.topology import LOG_SECONDS
from tests.chaos.checker import MIB
from tests.chaos.history import Sampled
from tests.chaos.story import Story, Stream

WARM_SECONDS = LOG_SECONDS  # of a process that has begun: what it keeps of logs is full then
GROWN_SECONDS = 600.0  # less than this tells nothing of an hour


@dataclass(frozen=True)
class Figures:
    """Seconds; a stream's gap is its longest pause between two chunks.

    Gaps are of the streams that ran when something struck (all, if nothing did), without those of
    clients that were told how to read, and `moved` those that another attempt went on with.
    `accept` is from the first try to the promise over all tries, so its most is how long new
    requests were kept out; `first` from the promise to the first token. `growth` is in MiB an hour,
    of each process that ran for long enough.
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


def figures(story: Story) -> Figures:
    """Raises nothing: where nothing was seen, a figure is 0."""
    streams = list(story.streams.values())
    struck = [stream for stream in streams if _ran_at_a_strike(stream, story)]
    gaps = [_gap(stream) for stream in struck]
    accepts = [s.accepted[0].at - s.submitted.at for s in streams if s.accepted]
    firsts = [s.chunks[0].at - s.accepted[0].at for s in streams if s.chunks and s.accepted]
    return Figures(
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
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0


def _growth(story: Story) -> Iterator[tuple[str, float]]:
    """Least squares over the resident bytes of each process once it is warm."""
    samples = defaultdict[tuple[str, int], list[Sampled]](list)
    for sample in story.all(Sampled):
        samples[sample.process, sample.pid].append(sample)
    for (process, _), all_of in samples.items():
        warm = [sample for sample in all_of if sample.at >= all_of[0].at + WARM_SECONDS]
        if warm and warm[-1].at - warm[0].at >= GROWN_SECONDS:
            slope = linear_regression([s.at for s in warm], [s.rss for s in warm]).slope
            yield process, round(slope * 3600 / MIB, 1)


def _gap(stream: Stream) -> float:
    return max((b.at - a.at for a, b in pairwise(stream.chunks)), default=0.0)


def _ran_at_a_strike(stream: Stream, story: Story) -> bool:
    if not stream.accepted or not stream.ended or stream.submitted.client in story.readers:
        return False
    begun, ended = stream.accepted[0].at, stream.ended[0].at
    return not story.strikes or any(begun <= strike.at <= ended for strike in story.strikes)
