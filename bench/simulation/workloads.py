"""Workloads: who asks for what, and when; drawn from a seed, replayed or in closed loops."""

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

    A run is over when all requests for which `awaited` is true have ended.
    """

    specs: Sequence[RequestSpec]
    seconds: float
    awaited: Callable[[RequestSpec], bool] = lambda spec: True


def steady(spec: RequestSpec, rate: float, seconds: float) -> Iterator[RequestSpec]:
    """Yield `rate` requests a second at even distances."""
    for number in range(int(rate * seconds)):
        yield replace(spec, at=number / rate)


def poisson(
    spec: RequestSpec, rate: float, seconds: float, random: Random
) -> Iterator[RequestSpec]:
    """Yield `rate` requests a second on average, with exponential gaps."""
    at = random.expovariate(rate)
    while at < seconds:
        yield replace(spec, at=at)
        at += random.expovariate(rate)


def merged(*streams: Iterable[RequestSpec]) -> list[RequestSpec]:
    """Merge streams of requests by time."""
    return list(heapq.merge(*streams, key=lambda spec: spec.at))


def trace(path: Path, parse_row: Callable[[dict[str, str]], RequestSpec]) -> list[RequestSpec]:
    """The requests of a trace's CSV file; `parse_row` makes a request of a row."""
    with path.open(newline="") as lines:
        return [parse_row(row) for row in csv.DictReader(lines)]


def sized(row: dict[str, str]) -> RequestSpec:
    """A request of a row's time and sizes, and of its tenant if it names one."""
    prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
    return RequestSpec(float(row["t_s"]), row.get("tenant_id", "all"), prompt, output)


def jittered(specs: Iterable[RequestSpec], max_delay: float, random: Random) -> list[RequestSpec]:
    """The requests, each later by up to `max_delay` seconds, in the order of their new times."""
    later = [replace(spec, at=spec.at + random.uniform(0, max_delay)) for spec in specs]
    return sorted(later, key=lambda spec: spec.at)


def patient(specs: Iterable[RequestSpec], deadline_seconds: float) -> Iterator[RequestSpec]:
    """The same requests with another deadline."""
    return (replace(spec, deadline_seconds=deadline_seconds) for spec in specs)


def resized(
    specs: Iterable[RequestSpec], rows: Sequence[RequestSpec], random: Random
) -> Iterator[RequestSpec]:
    """The same requests with the lengths of rows drawn at random."""
    for spec in specs:
        row = random.choice(rows)
        yield replace(spec, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens)


def by_tenants(specs: Iterable[RequestSpec], tenants: int, random: Random) -> Iterator[RequestSpec]:
    """The same requests, each of one of `tenants` tenants drawn at random."""
    return (replace(spec, tenant=f"t{random.randrange(tenants)}") for spec in specs)
