"""Requests of the traces, resampled in blocks, and an adversary's that go on and off."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

from bench.autoscaling.fleet_simulation import ModelArrival
from bench.simulation import workloads
from simulation.request import RequestSpec

BLOCK_SECONDS = 300.0


@cache
def read_trace(path: Path, kv_tokens: int) -> tuple[ModelArrival, ...]:
    """The requests of a trace that fit a machine, each for its model, or for `m`."""
    rows = workloads.trace(path, _row)
    return tuple(row for row in rows if row.spec.cost <= kv_tokens)


def _row(row: dict[str, str]) -> ModelArrival:
    return ModelArrival(row.get("model", "m"), replace(workloads.sized(row), tenant="all"))


def resample(rows: Sequence[ModelArrival], seconds: float, random: Random) -> list[ModelArrival]:
    """Blocks of a trace from places drawn at random, one behind the other; bursts are kept."""
    whole, found = rows[-1].spec.at, list[ModelArrival]()
    at = 0.0
    while at < seconds:
        begins = random.uniform(0, whole - BLOCK_SECONDS)
        found += [
            _moved(row, at - begins)
            for row in rows
            if begins <= row.spec.at < begins + BLOCK_SECONDS
        ]
        at += BLOCK_SECONDS
    return [row for row in found if row.spec.at < seconds]


def on_and_off(period: float, rate: float, seconds: float, random: Random) -> list[ModelArrival]:
    """Requests of one size at Poisson times, for one period, none for the next, and so on."""
    spec = RequestSpec(0.0, "all", 500, 100)
    found = workloads.poisson(spec, rate, seconds, random)
    return [ModelArrival("m", each) for each in found if int(each.at / period) % 2 == 0]


def _moved(row: ModelArrival, seconds: float) -> ModelArrival:
    return ModelArrival(row.model, replace(row.spec, at=row.spec.at + seconds))
