"""Requests of the traces, resampled in blocks, and an adversary's that go on and off."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

from bench.autoscaling.fleet_simulation import ModelArrival
from bench.simulation import workloads
from simulation.request import RequestSpec
from simulation.step_model import StepModel

BLOCK_SECONDS = 300.0


@cache
def read_trace(path: Path, steps: StepModel) -> tuple[ModelArrival, ...]:
    """The requests of a trace that fit a machine, each for its model, or for `m`."""

    def parse(row: dict[str, str]) -> RequestSpec:
        return replace(workloads.sized(row), tenant=row.get("model", "m"))

    found = workloads.trace(path, parse)
    return tuple(
        ModelArrival(spec.tenant, spec, expected_work(spec, steps))
        for spec in found
        if spec.cost <= steps.kv_tokens
    )


def expected_work(spec: RequestSpec, steps: StepModel) -> float:
    """Milliseconds of a machine for a request among its like, in as large a batch as fits.

    Its prompt is computed alone; each of its tokens takes its share of a step of the batch.
    """
    batch = min(steps.max_sequences, steps.kv_tokens // spec.cost)
    context = batch * (spec.prompt_tokens + spec.output_tokens / 2)
    step_ms = 1000 * steps.step_seconds(batch, int(context), 0)
    return steps.token_ms * spec.prompt_tokens + step_ms * spec.output_tokens / batch


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


def on_and_off(
    period: float, rate: float, seconds: float, steps: StepModel, random: Random
) -> list[ModelArrival]:
    """Requests of one size at Poisson times, for one period, none for the next, and so on."""
    spec = RequestSpec(0.0, "m", 500, 100)
    work = expected_work(spec, steps)
    found = workloads.poisson(spec, rate, seconds, random)
    return [ModelArrival("m", each, work) for each in found if int(each.at / period) % 2 == 0]


def _moved(row: ModelArrival, seconds: float) -> ModelArrival:
    return replace(row, spec=replace(row.spec, at=row.spec.at + seconds))
