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
    """The CSV trace is invalid, so that it cannot be replayed.

    The message says why, and names the line or the missing column.
    """


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request that a load is to send: `at` seconds after the load's start, with its lengths."""

    at: float
    prompt_tokens: int
    output_tokens: int


def read_trace(lines: Iterable[str]) -> list[Arrival]:
    """Return the requests of a CSV trace, sorted by time; the first one's time becomes 0 s.

    `lines` are the lines of the file, the header first. The columns `t_s`, `prompt_tokens` and
    `output_tokens` are needed; others are ignored. Raises `TraceError` if a column is missing, a
    value is not a number, a length is below 1, or there are no rows.
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
    """Return the mean number of arrivals per second of a trace whose first arrival is at 0 s.

    Returns infinity if all arrive at 0 s. The trace must not be empty.
    """
    span = trace[-1].at
    return (len(trace) - 1) / span if span else float("inf")


def replay_at_speed(trace: Iterable[Arrival], speed: float) -> Iterator[Arrival]:
    """Return an iterator over the trace's arrivals, with all times divided by `speed`."""
    return (replace(arrival, at=arrival.at / speed) for arrival in trace)


def replay_at_rate(trace: list[Arrival], rate: float) -> Iterator[Arrival]:
    """Return an iterator over the trace's arrivals, with a mean of `rate` arrivals per second.

    All times are scaled by one factor, so that bursts remain. If all arrivals have the same time,
    they are returned unchanged.
    """
    natural = mean_rate(trace)
    return replay_at_speed(trace, rate / natural) if natural < float("inf") else iter(trace)


def poisson_arrivals(rate: float, sizes: Arrival, random: Random) -> Iterator[Arrival]:
    """Yield an endless Poisson process of arrivals, with the token lengths of `sizes`.

    The gaps between arrivals, and that before the first, are drawn from `random` with a mean of
    1 / `rate` seconds. The time in `sizes` is not used.
    """
    at = 0.0
    while True:
        at += random.expovariate(rate)
        yield replace(sizes, at=at)


def repeat_sizes(trace: list[Arrival]) -> Iterator[Arrival]:
    """Return an endless iterator over the trace's arrivals in order, again and again, at time 0.

    Only the lengths matter: this is for a closed loop, which sends a request when an earlier one
    has ended.
    """
    return (replace(arrival, at=0.0) for arrival in itertools.cycle(trace))


def limit_arrivals(
    arrivals: Iterable[Arrival], seconds: float | None, requests: int | None
) -> Iterator[Arrival]:
    """Return an iterator that ends before the first arrival due at `seconds` or later.

    It also ends after `requests` arrivals. None as `seconds` or as `requests` means no such limit.
    """
    within = arrivals
    if seconds is not None:
        within = itertools.takewhile(lambda arrival: arrival.at < seconds, arrivals)
    return itertools.islice(within, requests)


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The limits, in tokens, on the lengths of each request of a load; None means no limit.

    `context` limits the sum of prompt and output.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    context: int | None = None

    def shorten(self, arrival: Arrival) -> Arrival:
        """Return a copy of `arrival` with its lengths cut to the limits and the same time.

        If prompt and output together exceed `context`, the prompt is cut, and the output only as
        far as it alone exceeds `context` less one token. Both keep at least one token.
        """
        room = self.context or float("inf")
        output = int(min(arrival.output_tokens, self.output_tokens or room, max(1, room - 1)))
        prompt = int(min(arrival.prompt_tokens, self.prompt_tokens or room, max(1, room - output)))
        return replace(arrival, prompt_tokens=prompt, output_tokens=output)
