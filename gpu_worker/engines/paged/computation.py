"""The computation of a step: one packed forward pass and its samples; who makes it fail, alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpu_worker.engine import DeviceLost
from gpu_worker.engines import memory
from gpu_worker.engines.paged.adapters import Adapters
from gpu_worker.engines.paged.forward import ForwardPass
from gpu_worker.engines.paged.parallel import Group
from gpu_worker.engines.paged.plan import Plan
from gpu_worker.engines.paged.run import Run, Slice
from gpu_worker.engines.paged.sampler import Choice, Sampled, sample
from gpu_worker.stats import Stats


@dataclass(frozen=True)
class Computed:
    """Slices whose KV is in place, and the next token of each run whose end they reached."""

    slices: list[Slice]
    sampled: list[tuple[Run, Sampled]]


@dataclass(frozen=True)
class TooLarge:
    """Slices that do not fit the memory together; nothing has changed."""

    slices: list[Slice]
    reason: str


@dataclass(frozen=True)
class Failed:
    """A run whose slice raises, even alone."""

    run: Run
    reason: str


Outcome = Computed | TooLarge | Failed


class Computation:
    """Computes slices; `choice` says how to choose a run's next token."""

    def __init__(
        self,
        forward: ForwardPass,
        adapters: Adapters,
        group: Group,
        choice: Callable[[Run], Choice],
    ) -> None:
        self._forward, self._adapters, self._group = forward, adapters, group
        self._choice = choice

    def outcomes(self, slices: list[Slice], stats: Stats) -> Iterator[Outcome]:
        """Compute slices together; if that fails, each alone, so that only the culprit fails.

        The caller takes up each outcome before it asks for the next. Raises `DeviceLost`.
        """
        plan = self._forward.plan(slices)
        try:
            sampled = self._sample(plan, stats)
        except Exception as error:  # whatever the model's code raises
            yield from self._without(slices, error, stats)
        else:
            runs = (piece.run for piece in plan.sampled)
            yield Computed(slices, list(zip(runs, sampled, strict=True)))

    def _sample(self, plan: Plan, stats: Stats) -> list[Sampled]:
        with stats.timed("build"):
            choices = [self._choice(piece.run) for piece in plan.sampled]
            self._adapters.apply(plan)
            compute = self._forward.prepared(plan, replay=not self._adapters.active)
        with stats.timed("forward"):
            self._group.compute(plan.slices)
            logits = compute()
        with stats.timed("sample"):
            return sample(logits, choices)

    def _without(self, slices: list[Slice], error: Exception, stats: Stats) -> Iterator[Outcome]:
        """What becomes of slices that were not computed."""
        reason = f"{type(error).__name__}: {error}"
        if self._group.size > 1:  # the others wait for what this rank has not computed
            raise DeviceLost(self._group.lost or reason) from error
        if memory.is_out_of_memory(error):
            self._forward.attention.shrink()
            yield TooLarge(slices, str(error))
        elif isinstance(error, torch.AcceleratorError):
            raise DeviceLost(str(error)) from error
        elif len(slices) == 1:
            yield Failed(slices[0].run, reason)
        else:
            for piece in slices:
                yield from self.outcomes([piece], stats)
