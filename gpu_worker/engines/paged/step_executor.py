"""Computes a step on all ranks and samples it; if that fails, finds the sequence at fault.

For that each sequence is computed alone.
"""

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
    """Slices that were computed, with the next token of each sequence whose end they reached."""

    slices: list[SequenceSlice]
    sampled: list[tuple[SequenceState, SampledToken]]


@dataclass(frozen=True)
class StepTooLarge:
    """Slices that did not fit the memory together; none of them counts as computed."""

    slices: list[SequenceSlice]
    reason: str


@dataclass(frozen=True)
class SequenceFailed:
    """A sequence whose slice raised an error even when computed alone; `reason` quotes it."""

    state: SequenceState
    reason: str


StepOutcome = StepComputed | StepTooLarge | SequenceFailed


class StepExecutor:
    """Computes an engine's steps on all ranks and samples the next tokens.

    `row_sampling` must return how a sequence's next token is to be chosen.
    """

    def __init__(
        self,
        runner: ModelRunner,
        adapters: LoraManager,
        group: TensorParallelGroup,
        row_sampling: Callable[[SequenceState], RowSampling],
    ) -> None:
        self._runner, self._adapters, self._group = runner, adapters, group
        self._row_sampling = row_sampling

    def execute(self, slices: list[SequenceSlice], stats: EngineStats) -> Iterator[StepOutcome]:
        """Compute slices together and yield the outcome, or each slice alone if that fails.

        Yields `StepComputed` for slices that were computed, and `StepTooLarge` for slices that ran
        out of memory. After any other error each slice is computed alone and has an outcome of its
        own, so that only the sequence at fault gets `SequenceFailed`. Each outcome must be
        processed before the next is asked for. Raises `DeviceLost` when the device fails and, with
        several ranks, on every error.
        """
        inputs = self._runner.make_inputs(slices)
        try:
            sampled = self._forward_and_sample(inputs, stats)
        except Exception as error:  # whatever the model's code raises
            yield from self._handle_failure(slices, error, stats)
        else:
            states = (seq_slice.state for seq_slice in inputs.sampled_slices)
            yield StepComputed(slices, list(zip(states, sampled, strict=True)))

    def _forward_and_sample(self, inputs: StepInputs, stats: EngineStats) -> list[SampledToken]:
        with measure(stats, "build"):
            row_samplings = [
                self._row_sampling(seq_slice.state) for seq_slice in inputs.sampled_slices
            ]
            self._adapters.apply(inputs)
            compute = self._runner.prepare_forward(inputs, replay=not self._adapters.is_active)
        with measure(stats, "forward"):
            self._group.compute_step(inputs.slices)
            logits = compute()
        with measure(stats, "sample"):
            return sample(logits, row_samplings)

    def _handle_failure(
        self, slices: list[SequenceSlice], error: Exception, stats: EngineStats
    ) -> Iterator[StepOutcome]:
        """Yield the outcomes of slices whose computation raised `error`."""
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
            for seq_slice in slices:
                yield from self.execute([seq_slice], stats)
