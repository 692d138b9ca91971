"""Arrivals of a load, Poisson or from a trace: when requests are due and how long. Pure.

Times are in seconds. An open loop uses times and sizes, a closed loop only the sizes.
"""

import csv
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

from streams.errors import BadRequest

COLUMNS = ("t_s", "prompt_tokens", "output_tokens")


class TraceError(BadRequest):
    """The trace cannot be replayed; the message names the line or the missing column."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that a load will send `at` seconds after its start, with its lengths in tokens."""

    at: float
    prompt_tokens: int
    output_tokens: int


def read_trace(lines: Iterable[str]) -> list[Arrival]:
    """Return the arrivals in a CSV file's lines, sorted by time and shifted to begin at 0 s.

    The columns `COLUMNS` are needed, others are ignored. Raises `TraceError` if one of them is
    missing, if a value is not a number or a length is below 1, or if there are no rows.
    """
    reader = csv.DictReader(lines)
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(f"the trace has no column {missing[0]!r}")
    rows = sorted((_parse_row(row, reader.line_num) for row in reader), key=lambda row: row.at)
    if not rows:
        raise TraceError("the trace has no rows")
    return [replace(row, at=row.at - rows[0].at) for row in rows]


def _parse_row(row: dict[str, str], line: int) -> Arrival:
    try:
        arrival = Arrival(float(row["t_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
    except (TypeError, ValueError) as error:
        raise TraceError(f"line {line} of the trace: {error}") from None
    if min(arrival.prompt_tokens, arrival.output_tokens) < 1 or not arrival.at < float("inf"):
        raise TraceError(f"line {line} of the trace: {row} is not a request")
    return arrival


def mean_rate(trace: list[Arrival]) -> float:
    """Return the mean arrivals per second of a trace; infinity if all have the same time."""
    span = trace[-1].at
    return (len(trace) - 1) / span if span else float("inf")


def replay_at_speed(trace: Iterable[Arrival], speed: float) -> Iterator[Arrival]:
    """Return an iterator over the trace's arrivals, with all times divided by `speed`."""
    return (replace(arrival, at=arrival.at / speed) for arrival in trace)


def replay_at_rate(trace: list[Arrival], rate: float) -> Iterator[Arrival]:
    """Return an iterator over the trace's arrivals, at a mean of `rate` arrivals a second.

    All times are scaled by one factor, so bursts stay. A trace whose arrivals all have the same
    time is left as it is.
    """
    natural = mean_rate(trace)
    return replay_at_speed(trace, rate / natural) if natural < float("inf") else iter(trace)


def poisson_arrivals(rate: float, sizes: Arrival, random: Random) -> Iterator[Arrival]:
    """Yield arrivals of a Poisson process without end, all of the same sizes.

    The gaps are drawn from `random`, with a mean of 1 / `rate` seconds. The time in `sizes` is not
    used.
    """
    at = 0.0
    while True:
        at += random.expovariate(rate)
        yield replace(sizes, at=at)


def repeat_sizes(trace: list[Arrival]) -> Iterator[Arrival]:
    """Return an endless iterator over the trace's sizes, again and again, all at time 0.

    For a closed loop, which sends a request when an earlier one has ended.
    """
    return (replace(arrival, at=0.0) for arrival in itertools.cycle(trace))


def limit_arrivals(
    arrivals: Iterable[Arrival], seconds: float | None, requests: int | None
) -> Iterator[Arrival]:
    """Return an iterator over the first arrivals: those before `seconds`, at most `requests`.

    None means no limit.
    """
    within = arrivals
    if seconds is not None:
        within = itertools.takewhile(lambda arrival: arrival.at < seconds, arrivals)
    return itertools.islice(within, requests)


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The longest prompt and output that a load may send, in tokens; None means no limit.

    `context` limits their sum.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    context: int | None = None

    def shorten(self, arrival: Arrival) -> Arrival:
        """Return the arrival with its lengths cut to the limits; the time stays.

        To fit `context` the output is cut first, then the prompt. Both keep at least one token.
        """
        room = self.context or float("inf")
        output = int(min(arrival.output_tokens, self.output_tokens or room, max(1, room - 1)))
        prompt = int(min(arrival.prompt_tokens, self.prompt_tokens or room, max(1, room - output)))
        return replace(arrival, prompt_tokens=prompt, output_tokens=output)
