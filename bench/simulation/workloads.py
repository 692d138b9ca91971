"""Who asks for what, and when: open loops drawn from a seed or replayed, and closed ones."""

import csv
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from simulation.request import RequestSpec


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their times; those that repeat do so until `seconds`.

    A run is over when all that are `awaited` have ended.
    """

    asked: Sequence[RequestSpec]
    seconds: float
    awaited: Callable[[RequestSpec], bool] = lambda asked: True


def steady(asked: RequestSpec, rate: float, seconds: float) -> Iterator[RequestSpec]:
    """`rate` requests a second at even distances."""
    for number in range(int(rate * seconds)):
        yield replace(asked, at=number / rate)


def poisson(
    asked: RequestSpec, rate: float, seconds: float, random: Random
) -> Iterator[RequestSpec]:
    """`rate` requests a second on average, with exponential gaps."""
    at = random.expovariate(rate)
    while at < seconds:
        yield replace(asked, at=at)
        at += random.expovariate(rate)


def merged(*streams: Iterable[RequestSpec]) -> list[RequestSpec]:
    return list(heapq.merge(*streams, key=lambda asked: asked.at))


def trace(path: Path, of: Callable[[dict[str, str]], RequestSpec]) -> list[RequestSpec]:
    """The rows of a trace's CSV; `of` makes a request of one."""
    with path.open(newline="") as lines:
        return [of(row) for row in csv.DictReader(lines)]


def sized(row: dict[str, str]) -> RequestSpec:
    """A row with a time and sizes, and a tenant if it names one."""
    prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
    return RequestSpec(float(row["t_s"]), row.get("tenant_id", "all"), prompt, output)


def jittered(asked: Iterable[RequestSpec], most: float, random: Random) -> list[RequestSpec]:
    """Each later by up to `most` seconds."""
    later = [replace(each, at=each.at + random.uniform(0, most)) for each in asked]
    return sorted(later, key=lambda each: each.at)


def patient(asked: Iterable[RequestSpec], deadline_seconds: float) -> Iterator[RequestSpec]:
    return (replace(each, deadline_seconds=deadline_seconds) for each in asked)


def resized(
    asked: Iterable[RequestSpec], rows: Sequence[RequestSpec], random: Random
) -> Iterator[RequestSpec]:
    """The same arrivals with the lengths of rows drawn at random."""
    for each in asked:
        row = random.choice(rows)
        yield replace(each, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens)


def by_tenants(asked: Iterable[RequestSpec], tenants: int, random: Random) -> Iterator[RequestSpec]:
    """The same arrivals, each of some tenant."""
    return (replace(each, tenant=f"t{random.randrange(tenants)}") for each in asked)
