"""The unary engine: runs the inputs of many requests through one model, in padded batches."""

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
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
from gpu_worker.engines.checkpoints.loading import refuse_model
from gpu_worker.engines.engine import DeviceLost, EngineError, FreeCapacity, Output, Sequence
from gpu_worker.engines.sequence_limits import SequenceLimits, count_reserved_tokens
from gpu_worker.engines.unary.batch_memory import fit_batch_tokens
from gpu_worker.engines.unary.batch_time_model import BatchTimeModel
from gpu_worker.engines.unary.batcher import Batcher
from gpu_worker.engines.unary.micro_batches import split_into_micro_batches
from gpu_worker.engines.unary.padding import PaddedBatch, TokenizedInput, pad_inputs
from registry.model_inspection import inspect_model

NAP_SECONDS = 0.001
CHECKED_TOKENS = (5, 29)  # of two inputs whose rows must not depend on each other
ROW_ERROR, ROW_ERROR_HALF = 1e-3, 0.1  # shares of a row's largest number: float32, other types
WARM_UP_SHAPES = ((1, 8), (4, 32), (4, 128), (16, 128))  # inputs, tokens of each


class Head(Protocol):
    """A model with its pooling or classification layer: padded inputs to one row of numbers each.

    `labels` name the columns of the rows, None if they have no names. With `normalises`, rows are
    vectors of length one, and must be normalised again when they are cut.
    """

    model: PreTrainedModel
    labels: list[str] | None
    normalises: bool

    def __call__(self, batch: PaddedBatch) -> Tensor:
        """Return one row per input: float32 `[rows, size]`, on the model's device."""


@dataclass(eq=False)
class _UnaryRequest:
    """One request, and the packed rows of its inputs so far, by index."""

    sequence: Sequence
    rows: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _RequestInput:
    """One input of a request, and its index there."""

    request: _UnaryRequest
    index: int
    input: TokenizedInput

    def token_count(self) -> int:
        """Return the input's number of tokens."""
        return len(self.input.tokens)


class UnaryEngine(ABC):
    """An `Engine` for requests with `inputs` to embed or classify; a step runs one micro-batch.

    Inputs of all requests are collected until a batch is due, of at most `batch_inputs` inputs. It
    is cut by length into micro-batches of at most `max_batch_tokens` tokens with padding. A request
    has one output, when its last input is done. For a request with a deadline or goal, the batch
    begins early enough to be done `margin_ms` before that. `max_sequences` and `queue_tokens` bound
    the free capacity that is announced. Making an engine warms it up.
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
        self._check_rows_independent()
        self._time_model = BatchTimeModel(self._warm_up())
        self.batcher: Batcher[_RequestInput] = Batcher(
            batch_inputs, self._max_batch_tokens, self._time_model, margin_ms / 1000
        )
        self._planned: deque[list[_RequestInput]] = deque()
        self._requests: dict[str, _UnaryRequest] = {}
        self._reserved = 0
        self._ready: list[Output] = []
        self.step_tokens: Counter[str] = Counter()

    @staticmethod
    @abstractmethod
    def load_head(directory: Path, device: torch.device) -> Head:
        """Load the model of a directory onto a device, in eval mode. Raises if that fails."""

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        max_sequences: int = 256,
        batch_inputs: int = 64,
        max_batch_tokens: int = 4096,
        margin_ms: float = 50.0,
        memory_bytes: int | None = None,
        threads: int | None = None,
        device: str | None = None,
        stage: Callable[[str], None] = lambda name: None,
    ) -> Self:
        """Load the model of a directory, warm it up, and return its engine; blocks until then.

        `stage` is called with the name of each stage as it begins: `load`, `warm_up`. The model
        goes onto `device` (None: a GPU if there is one). `threads` are torch's (None or 0: its
        default). With `memory_bytes`, micro-batches get fewer tokens than `max_batch_tokens` where
        they would not fit in it beside the weights. Raises `DoesNotFit` if not even the longest
        input does, `UnsupportedModel` for a model that is not whole or whose rows depend on their
        batch, and other errors of a model that cannot be loaded or run.
        """
        if threads:
            torch.set_num_threads(threads)
        stage("load")
        head = cls.load_head(
            directory, torch.device(device) if device else device_memory.default_device()
        )
        stage("warm_up")
        context = inspect_model(directory).context_length
        if memory_bytes is not None:
            weights, on = device_memory.model_bytes(head.model), head.model.device
            max_batch_tokens = fit_batch_tokens(
                head, weights, on, context, max_batch_tokens, memory_bytes
            )
        return cls(
            head,
            context,
            max_sequences=max_sequences,
            batch_inputs=batch_inputs,
            max_batch_tokens=max_batch_tokens,
            margin_ms=margin_ms,
        )

    def add(self, sequence: Sequence) -> None:
        """Take a sequence. One that cannot run comes back from the next `step` with an error.

        Each request id may be in the engine only once at a time.
        """
        assert sequence.request_id not in self._requests, f"{sequence.request_id} was added before"
        if refusal := self._limits.find_refusal(sequence):
            self._ready.append(Output(sequence.request_id, error=refusal))
            return
        request = self._requests[sequence.request_id] = _UnaryRequest(sequence)
        self._reserved += count_reserved_tokens(sequence)
        latest_times = [at for at in (sequence.deadline, sequence.goal) if at is not None]
        request_inputs = [
            (request_input, request_input.token_count()) for request_input in _split_inputs(request)
        ]
        self.batcher.add(request_inputs, time.monotonic(), min(latest_times, default=None))

    def cancel(self, request_id: str) -> None:
        """Drop a sequence; the next `step` returns its `cancelled` output. Idempotent.

        Unknown and finished requests are ignored.
        """
        if request := self._requests.get(request_id):
            self._ready.append(self._remove(request, Output(request_id, finish="cancelled")))

    def step(self) -> list[Output]:
        """Run the next micro-batch, if one is due, and return the outputs that are complete.

        If none is due, waits up to a millisecond; the list may be empty. Inputs that fail together
        are run again one by one, so that only the request at fault gets an error. Raises
        `DeviceLost` if the GPU fails other than for lack of memory.
        """
        if not self._planned:
            self._plan_micro_batches()
        outputs, self._ready = self._ready, []
        self.step_tokens = Counter()
        if self._planned:
            for each in filter(self._is_wanted, self._planned[0]):
                self.step_tokens[each.request.sequence.request_id] += each.token_count()
            outputs += self._run_micro_batch(self._planned.popleft())
        return outputs

    def free_capacity(self) -> FreeCapacity:
        """Return how many more requests and input tokens would fit into the queue now."""
        sequences = self._max_sequences - len(self._requests)
        return FreeCapacity(max(0, sequences), max(0, self._queue_tokens - self._reserved))

    @property
    def idle(self) -> bool:
        """True when there is no request and no output to return."""
        return not self._requests and not self._ready

    def close(self) -> None:
        """Drop every request without an output, and free the memory of the weights."""
        self._requests.clear()
        self._planned.clear()
        self.batcher.remove_if(lambda _: True)
        device = self.head.model.device
        del self.head
        device_memory.release_cached_memory(device)

    def _check_rows_independent(self) -> None:
        """Raise `UnsupportedModel` if the model fails, or a row changes with what shares its batch.

        Some models compute with all tokens of a padded text, whatever the mask says.
        """
        last, longest = self._limits.vocabulary - 1, self._limits.tokens
        lengths = (min(tokens, longest) for tokens in CHECKED_TOKENS)
        short, long = (
            TokenizedInput([min(5 + 3 * n, last) for n in range(length)]) for length in lengths
        )
        try:
            alone, together = self._forward([short])[0], self._forward([short, long])[0]
        except Exception as error:  # whatever the model's code raises
            if device_memory.is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
                raise
            reason = " ".join(str(error).split())[:500]
            raise refuse_model(type(self.head.model).__name__, f"it fails: {reason}") from error
        is_half = self.head.model.dtype.itemsize < torch.float32.itemsize
        share = ROW_ERROR_HALF if is_half else ROW_ERROR
        if bool((alone - together).abs().max() > share * alone.abs().max()):
            raise refuse_model(
                type(self.head.model).__name__,
                "what it computes of an input depends on the inputs of its batch",
            )

    def _warm_up(self) -> list[tuple[int, float]]:
        """Run a few shapes and return the tokens and seconds of each.

        Each shape runs twice, and only the second run is measured: the first one is slower.
        """
        samples = []
        for rows, tokens in WARM_UP_SHAPES:
            inputs = [TokenizedInput([0] * min(tokens, self._limits.tokens))] * rows
            self._forward(inputs)
            began = time.perf_counter()
            self._forward(inputs)
            samples.append((_count_padded_tokens(inputs), time.perf_counter() - began))
        return samples

    def _plan_micro_batches(self) -> None:
        """Cut the batch that is due into micro-batches; wait up to a millisecond while none is."""
        now = time.monotonic()
        due = self.batcher.due_at()
        if due is not None and due > now and not self._ready:
            time.sleep(min(due - now, NAP_SECONDS))
            now = time.monotonic()
        batch, max_padding = self.batcher.pop_due(now), self._time_model.overhead_tokens
        self._planned += split_into_micro_batches(
            batch, _RequestInput.token_count, self._max_batch_tokens, max_padding
        )

    def _run_micro_batch(self, request_inputs: list[_RequestInput]) -> list[Output]:
        """Compute inputs together; if that fails, each alone, so that only the culprit fails."""
        request_inputs = [
            request_input for request_input in request_inputs if self._is_wanted(request_input)
        ]
        if not request_inputs:
            return []
        try:
            rows = self._forward_timed([request_input.input for request_input in request_inputs])
        except Exception as error:  # whatever the model's code raises
            if isinstance(error, torch.AcceleratorError) and not device_memory.is_out_of_memory(
                error
            ):
                raise DeviceLost(str(error)) from error
            if len(request_inputs) == 1:
                return [self._fail(request_inputs[0].request, f"{type(error).__name__}: {error}")]
            return [
                output
                for request_input in request_inputs
                for output in self._run_micro_batch([request_input])
            ]
        pairs = zip(request_inputs, rows, strict=True)
        return [
            output
            for request_input, row in pairs
            if (output := self._store_row(request_input, row))
        ]

    def _is_wanted(self, request_input: _RequestInput) -> bool:
        """Return False if the request was cancelled, or another of its inputs has failed."""
        return (
            self._requests.get(request_input.request.sequence.request_id) is request_input.request
        )

    def _forward_timed(self, inputs: list[TokenizedInput]) -> Tensor:
        began = time.perf_counter()
        rows = self._forward(inputs)
        self._time_model.add_sample(_count_padded_tokens(inputs), time.perf_counter() - began)
        return rows

    @torch.inference_mode()
    def _forward(self, inputs: list[TokenizedInput]) -> Tensor:
        return self.head(pad_inputs(inputs, self.head.model.device)).cpu()

    def _store_row(self, request_input: _RequestInput, row: Tensor) -> Output | None:
        """Keep an input's row; returns the request's output if it was the last one."""
        request = request_input.request
        if not self._is_wanted(request_input):
            return None
        if not bool(row.isfinite().all()):
            return self._fail(request, "the model's output is not a number")
        request.rows[request_input.index] = self._to_bytes(row, request.sequence.dimensions)
        if len(request.rows) < len(request.sequence.inputs):
            return None
        rows = [request.rows[index] for index in range(len(request.rows))]
        labels = self.head.labels
        output = Output(request.sequence.request_id, vectors=rows, labels=labels, finish="stop")
        return self._remove(request, output)

    def _to_bytes(self, row: Tensor, dimensions: int | None) -> bytes:
        """Pack a row as float32 little-endian, cut to the first `dimensions` (Matryoshka)."""
        if dimensions is not None and dimensions < len(row):
            row = row[:dimensions]
            row = normalize(row, dim=0) if self.head.normalises else row
        return row.numpy().astype("<f4").tobytes()

    def _fail(self, request: _UnaryRequest, reason: str) -> Output:
        error = EngineError("engine_failed", reason)
        return self._remove(request, Output(request.sequence.request_id, error=error))

    def _remove(self, request: _UnaryRequest, output: Output) -> Output:
        del self._requests[request.sequence.request_id]
        self._reserved -= count_reserved_tokens(request.sequence)
        if len(request.rows) < len(request.sequence.inputs):
            self.batcher.remove_if(lambda request_input: request_input.request is request)
        return output


def _split_inputs(request: _UnaryRequest) -> list[_RequestInput]:
    sequence = request.sequence
    inputs = map(TokenizedInput, sequence.inputs, sequence.splits or repeat(None))
    return [_RequestInput(request, index, each) for index, each in enumerate(inputs)]


def _count_padded_tokens(inputs: list[TokenizedInput]) -> int:
    """Return how many tokens a micro-batch has with its padding."""
    return len(inputs) * max(len(each.tokens) for each in inputs)
