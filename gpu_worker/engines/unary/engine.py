"""The unary engine: inputs of many requests in padded batches through one model."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from gpu_worker.engines import device_memory
from gpu_worker.engines.engine import DeviceLost, EngineError, FreeCapacity, Output, Sequence
from gpu_worker.engines.sequence_limits import SequenceLimits, count_reserved_tokens
from gpu_worker.engines.unary.batch_time_model import BatchTimeModel
from gpu_worker.engines.unary.batcher import Batcher
from gpu_worker.engines.unary.micro_batches import split_into_micro_batches
from gpu_worker.engines.unary.padding import PaddedBatch, TokenizedInput, pad_inputs
from registry.model_inspection import inspect_model

NAP_SECONDS = 0.001
WARM_UP_SHAPES = ((1, 8), (4, 32), (4, 128), (16, 128))  # inputs, tokens of each


class Head(Protocol):
    """A model and what makes one row of numbers of each input. `labels` name its columns, if any.

    `normalises`: rows are of length one, and should be so again when they are cut.
    """

    model: PreTrainedModel
    labels: list[str] | None
    normalises: bool

    def __call__(self, batch: PaddedBatch) -> Tensor:
        """`[rows, size]`, float32, on the model's device."""


@dataclass(eq=False)
class _UnaryRequest:
    """One request: its rows so far, by input."""

    sequence: Sequence
    rows: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _RequestInput:
    """One input of a request."""

    request: _UnaryRequest
    index: int
    input: TokenizedInput

    def token_count(self) -> int:
        return len(self.input.tokens)


class UnaryEngine(ABC):
    """An `Engine` for `inputs`. A step runs one micro-batch.

    Inputs are collected as `Batcher` says. A batch is cut, by length, into micro-batches of at most
    `max_batch_tokens` with their padding. A request is answered whole, when its last input is done.
    """

    def __init__(
        self,
        head: Head,
        context: int,
        *,
        max_sequences: int = 256,
        batch_inputs: int = 64,
        max_batch_tokens: int = 4096,
        queue_tokens: int = 262_144,
        margin_ms: float = 50.0,
    ) -> None:
        self.head = head
        self._limits = SequenceLimits(head.model.config.get_text_config().vocab_size, context)
        self._max_sequences, self._queue_tokens = max_sequences, queue_tokens
        self._max_batch_tokens = max(max_batch_tokens, context)
        self._compute = BatchTimeModel(self._warm_up())
        self.batcher: Batcher[_RequestInput] = Batcher(
            batch_inputs, self._max_batch_tokens, self._compute, margin_ms / 1000
        )
        self._planned: deque[list[_RequestInput]] = deque()
        self._requests: dict[str, _UnaryRequest] = {}
        self._reserved = 0
        self._ready: list[Output] = []

    @staticmethod
    @abstractmethod
    def load_head(directory: Path, device: torch.device) -> Head:
        """The model of a directory, on a device."""

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        max_sequences: int = 256,
        batch_inputs: int = 64,
        max_batch_tokens: int = 4096,
        margin_ms: float = 50.0,
        threads: int | None = None,
        device: str | None = None,
        stage: Callable[[str], None] = lambda name: None,
    ) -> Self:
        """Load a directory and warm up; `stage` hears what is being done.

        Raises the error of a model that cannot run at all.
        """
        if threads:
            torch.set_num_threads(threads)
        stage("load")
        head = cls.load_head(
            directory, torch.device(device) if device else device_memory.default_device()
        )
        stage("warm_up")
        return cls(
            head,
            inspect_model(directory).context_length,
            max_sequences=max_sequences,
            batch_inputs=batch_inputs,
            max_batch_tokens=max_batch_tokens,
            margin_ms=margin_ms,
        )

    def add(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self._requests, f"{sequence.request_id} is here already"
        if refusal := self._limits.find_refusal(sequence):
            self._ready.append(Output(sequence.request_id, error=refusal))
            return
        job = self._requests[sequence.request_id] = _UnaryRequest(sequence)
        self._reserved += count_reserved_tokens(sequence)
        times = [at for at in (sequence.deadline, sequence.goal) if at is not None]
        parts = [(part, part.token_count()) for part in _split_inputs(job)]
        self.batcher.add(parts, time.monotonic(), min(times, default=None))

    def cancel(self, request_id: str) -> None:
        if job := self._requests.get(request_id):
            self._ready.append(self._remove(job, Output(request_id, finish="cancelled")))

    def step(self) -> list[Output]:
        if not self._planned:
            self._plan_micro_batches()
        outputs, self._ready = self._ready, []
        if self._planned:
            outputs += self._run_micro_batch(self._planned.popleft())
        return outputs

    def free_capacity(self) -> FreeCapacity:
        sequences = self._max_sequences - len(self._requests)
        return FreeCapacity(max(0, sequences), max(0, self._queue_tokens - self._reserved))

    @property
    def idle(self) -> bool:
        return not self._requests and not self._ready

    def close(self) -> None:
        """Forget every request, and give back the memory of the weights."""
        self._requests.clear()
        self._planned.clear()
        self.batcher.remove_if(lambda _: True)
        device = self.head.model.device
        del self.head
        device_memory.release_cached_memory(device)

    def _warm_up(self) -> list[tuple[int, float]]:
        """Run a few shapes; their tokens and seconds. The first run of each is slower: left out."""
        samples = []
        for rows, tokens in WARM_UP_SHAPES:
            inputs = [TokenizedInput([0] * min(tokens, self._limits.tokens))] * rows
            self._forward(inputs)
            began = time.perf_counter()
            self._forward(inputs)
            samples.append((_count_padded_tokens(inputs), time.perf_counter() - began))
        return samples

    def _plan_micro_batches(self) -> None:
        """Cut the batch that is due into micro-batches; nap for a millisecond while none is."""
        now = time.monotonic()
        due = self.batcher.due_at()
        if due is not None and due > now and not self._ready:
            time.sleep(min(due - now, NAP_SECONDS))
            now = time.monotonic()
        batch, padding = self.batcher.pop_due(now), self._compute.overhead_tokens
        self._planned += split_into_micro_batches(
            batch, _RequestInput.token_count, self._max_batch_tokens, padding
        )

    def _run_micro_batch(self, parts: list[_RequestInput]) -> list[Output]:
        """Compute inputs together; if that fails, each alone, so that only the culprit fails."""
        parts = [part for part in parts if self._is_wanted(part)]
        if not parts:
            return []
        try:
            rows = self._forward_timed([part.input for part in parts])
        except Exception as error:  # whatever the model's code raises
            if isinstance(error, torch.AcceleratorError) and not device_memory.is_out_of_memory(
                error
            ):
                raise DeviceLost(str(error)) from error
            if len(parts) == 1:
                return [self._fail(parts[0].request, f"{type(error).__name__}: {error}")]
            return [output for part in parts for output in self._run_micro_batch([part])]
        pairs = zip(parts, rows, strict=True)
        return [output for part, row in pairs if (output := self._store_row(part, row))]

    def _is_wanted(self, part: _RequestInput) -> bool:
        """False once its request was cancelled, or another of its inputs has failed."""
        return self._requests.get(part.request.sequence.request_id) is part.request

    def _forward_timed(self, inputs: list[TokenizedInput]) -> Tensor:
        began = time.perf_counter()
        rows = self._forward(inputs)
        self._compute.add_sample(_count_padded_tokens(inputs), time.perf_counter() - began)
        return rows

    @torch.inference_mode()
    def _forward(self, inputs: list[TokenizedInput]) -> Tensor:
        return self.head(pad_inputs(inputs, self.head.model.device)).cpu()

    def _store_row(self, part: _RequestInput, row: Tensor) -> Output | None:
        """Keep a row; the request's output if it was the last one."""
        job = part.request
        if not self._is_wanted(part):
            return None
        if not bool(row.isfinite().all()):
            return self._fail(job, "the model's output is not a number")
        job.rows[part.index] = self._to_bytes(row, job.sequence.dimensions)
        if len(job.rows) < len(job.sequence.inputs):
            return None
        rows = [job.rows[index] for index in range(len(job.rows))]
        labels = self.head.labels
        output = Output(job.sequence.request_id, vectors=rows, labels=labels, finish="stop")
        return self._remove(job, output)

    def _to_bytes(self, row: Tensor, dimensions: int | None) -> bytes:
        """Float32 little-endian, cut to the first `dimensions` (Matryoshka)."""
        if dimensions is not None and dimensions < len(row):
            row = row[:dimensions]
            row = normalize(row, dim=0) if self.head.normalises else row
        return row.numpy().astype("<f4").tobytes()

    def _fail(self, job: _UnaryRequest, reason: str) -> Output:
        error = EngineError("engine_failed", reason)
        return self._remove(job, Output(job.sequence.request_id, error=error))

    def _remove(self, job: _UnaryRequest, output: Output) -> Output:
        del self._requests[job.sequence.request_id]
        self._reserved -= count_reserved_tokens(job.sequence)
        if len(job.rows) < len(job.sequence.inputs):
            self.batcher.remove_if(lambda part: part.request is job)
        return output


def _split_inputs(job: _UnaryRequest) -> list[_RequestInput]:
    sequence = job.sequence
    inputs = map(TokenizedInput, sequence.inputs, sequence.splits or repeat(None))
    return [_RequestInput(job, index, each) for index, each in enumerate(inputs)]


def _count_padded_tokens(inputs: list[TokenizedInput]) -> int:
    """How many tokens a micro-batch has with its padding."""
    return len(inputs) * max(len(each.tokens) for each in inputs)
