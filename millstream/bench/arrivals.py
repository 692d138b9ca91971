"""When requests arrive and how long they are: Poisson or a replayed trace. Pure; times are seconds.

An open loop takes all of an arrival, a closed loop only its sizes.
"""

import csv
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

from streams.errors import BadRequest

COLUMNS = ("t_s", "prompt_tokens", "output_tokens")


class TraceError(BadRequest):
    """A trace that cannot be replayed; the message names the line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to be: `at` seconds after the load began."""

    at: float
    prompt_tokens: int
    output_tokens: int


def read_trace(lines: Iterable[str]) -> list[Arrival]:
    """The rows of a CSV in the order of their time, the first at 0; other columns are passed over.

    Raises `TraceError` for a missing column, a value that is no number or no size, and for no rows.
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
    """Arrivals a second over the whole trace; infinite where all come at once."""
    span = trace[-1].at
    return (len(trace) - 1) / span if span else float("inf")


def replay_at_speed(trace: Iterable[Arrival], speed: float) -> Iterator[Arrival]:
    """The same arrivals with time running `speed` times as fast."""
    return (replace(arrival, at=arrival.at / speed) for arrival in trace)


def replay_at_rate(trace: list[Arrival], rate: float) -> Iterator[Arrival]:
    """The same arrivals at a mean of `rate` a second over the whole trace, bursts kept."""
    natural = mean_rate(trace)
    return replay_at_speed(trace, rate / natural) if natural < float("inf") else iter(trace)


def poisson_arrivals(rate: float, sizes: Arrival, random: Random) -> Iterator[Arrival]:
    """Endless arrivals with exponential gaps of mean 1 / `rate`, all of the same sizes."""
    at = 0.0
    while True:
        at += random.expovariate(rate)
        yield replace(sizes, at=at)


def repeat_sizes(trace: list[Arrival]) -> Iterator[Arrival]:
    """Sizes for a closed loop: the trace's, over and over, without their times."""
    return (replace(arrival, at=0.0) for arrival in itertools.cycle(trace))


def limit_arrivals(
    arrivals: Iterable[Arrival], seconds: float | None, requests: int | None
) -> Iterator[Arrival]:
    """Arrivals before `seconds`, at most `requests` of them; None is no limit."""
    within = arrivals
    if seconds is not None:
        within = itertools.takewhile(lambda arrival: arrival.at < seconds, arrivals)
    return itertools.islice(within, requests)


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The longest requests a load may send; None is no limit. `context` bounds both together."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    context: int | None = None

    def shorten(self, arrival: Arrival) -> Arrival:
        """Shorten what is too long: the output first to its limits, then the prompt to the rest."""
        room = self.context or float("inf")
        output = int(min(arrival.output_tokens, self.output_tokens or room, max(1, room - 1)))
        prompt = int(min(arrival.prompt_tokens, self.prompt_tokens or room, max(1, room - output)))
        return replace(arrival, prompt_tokens=prompt, output_tokens=output)
