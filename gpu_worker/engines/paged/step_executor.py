"""The computation of a step: one packed forward pass and its samples; who makes it fail, alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpu_worker.engines import device_memory
from gpu_worker.engines.engine import DeviceLost
from gpu_worker.engines.engine_stats import EngineStats
from gpu_worker.engines.paged.batch.sequence_state import SequenceSlice, SequenceState
from gpu_worker.engines.paged.batch.step_inputs import StepInputs
from gpu_worker.engines.paged.model_runner import ModelRunner
from gpu_worker.engines.paged.sampler import RowSampling, SampledToken, sample
from gpu_worker.engines.paged.tensor_parallel import TensorParallelGroup
from gpu_worker.engines.paged.weights.lora_manager import LoraManager
from gpu_worker.engines.step_timer import measure


@dataclass(frozen=True)
class StepComputed:
    """Slices whose KV is in place, and the next token of each run whose end they reached."""

    slices: list[SequenceSlice]
    sampled: list[tuple[SequenceState, SampledToken]]


@dataclass(frozen=True)
class StepTooLarge:
    """Slices that do not fit the memory together; nothing has changed."""

    slices: list[SequenceSlice]
    reason: str


@dataclass(frozen=True)
class SequenceFailed:
    """A run whose slice raises, even alone."""

    state: SequenceState
    reason: str


StepOutcome = StepComputed | StepTooLarge | SequenceFailed


class StepExecutor:
    """Computes slices; `choice` says how to choose a run's next token."""

    def __init__(
        self,
        forward: ModelRunner,
        adapters: LoraManager,
        group: TensorParallelGroup,
        choice: Callable[[SequenceState], RowSampling],
    ) -> None:
        self._runner, self._adapters, self._group = forward, adapters, group
        self._row_sampling = choice

    def execute(self, slices: list[SequenceSlice], stats: EngineStats) -> Iterator[StepOutcome]:
        """Compute slices together; if that fails, each alone, so that only the culprit fails.

        The caller takes up each outcome before it asks for the next. Raises `DeviceLost`.
        """
        plan = self._runner.make_inputs(slices)
        try:
            sampled = self._forward_and_sample(plan, stats)
        except Exception as error:  # whatever the model's code raises
            yield from self._handle_failure(slices, error, stats)
        else:
            runs = (piece.state for piece in plan.sampled_slices)
            yield StepComputed(slices, list(zip(runs, sampled, strict=True)))

    def _forward_and_sample(self, plan: StepInputs, stats: EngineStats) -> list[SampledToken]:
        with measure(stats, "build"):
            choices = [self._row_sampling(piece.state) for piece in plan.sampled_slices]
            self._adapters.apply(plan)
            compute = self._runner.prepare_forward(plan, replay=not self._adapters.is_active)
        with measure(stats, "forward"):
            self._group.compute_step(plan.slices)
            logits = compute()
        with measure(stats, "sample"):
            return sample(logits, choices)

    def _handle_failure(
        self, slices: list[SequenceSlice], error: Exception, stats: EngineStats
    ) -> Iterator[StepOutcome]:
        """What becomes of slices that were not computed."""
        reason = f"{type(error).__name__}: {error}"
        if self._group.world_size > 1:  # the others wait for what this rank has not computed
            raise DeviceLost(self._group.lost_reason or reason) from error
        if device_memory.is_out_of_memory(error):
            self._runner.attention.free_buffers()
            yield StepTooLarge(slices, str(error))
        elif isinstance(error, torch.AcceleratorError):
            raise DeviceLost(str(error)) from error
        elif len(slices) == 1:
            yield SequenceFailed(slices[0].state, reason)
        else:
            for piece in slices:
                yield from self.execute([piece], stats)
