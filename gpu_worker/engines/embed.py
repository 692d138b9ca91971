"""The embedding engine: inputs of many requests in padded batches through one encoder."""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, PreTrainedModel

from gpu_worker.batcher import Batcher
from gpu_worker.engine import EngineError, Output, Room, Sequence
from gpu_worker.engines import memory
from gpu_worker.engines.pooling import Pooling
from gpu_worker.limits import Limits, reserved

NAP_SECONDS = 0.001
WARM_UP_LENGTHS = (8, 32, 128)


@dataclass(eq=False)
class _Job:
    """One request: its vectors so far, by input."""

    sequence: Sequence
    vectors: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Input:
    """One input of a request."""

    job: _Job
    index: int

    @property
    def tokens(self) -> list[int]:
        return self.job.sequence.inputs[self.index]


class EmbedEngine:
    """An `Engine` for `inputs`. A step runs one micro-batch.

    Inputs are collected until there are `batch_inputs`, the oldest has waited `wait_ms`, or a
    deadline is `margin_ms` away. A batch is cut, by length, into micro-batches of at most
    `max_batch_tokens` with their padding. A request is answered whole, when its last input is done.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pooling: Pooling,
        context: int,
        *,
        max_sequences: int = 256,
        batch_inputs: int = 64,
        max_batch_tokens: int = 4096,
        queue_tokens: int = 262_144,
        wait_ms: float = 4.0,
        margin_ms: float = 50.0,
    ) -> None:
        self._model, self._pooling = model, pooling
        self._limits = Limits(model.config.vocab_size, context)
        self._max_sequences, self._queue_tokens = max_sequences, queue_tokens
        self._max_batch_tokens = max(max_batch_tokens, context)
        self._batcher: Batcher[_Input] = Batcher(batch_inputs, wait_ms / 1000, margin_ms / 1000)
        self._planned: deque[list[_Input]] = deque()
        self._jobs: dict[str, _Job] = {}
        self._reserved = 0
        self._ready: list[Output] = []

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        max_sequences: int = 256,
        batch_inputs: int = 64,
        max_batch_tokens: int = 4096,
        wait_ms: float = 4.0,
        margin_ms: float = 50.0,
        threads: int | None = None,
        device: str | None = None,
        stage: Callable[[str], None] = lambda name: None,
    ) -> "EmbedEngine":
        """Load a sentence-transformers (or plain encoder) directory and warm up.

        `stage` hears what is being done.
        """
        if threads:
            torch.set_num_threads(threads)
        stage("load")
        place = torch.device(device) if device else memory.default_device()
        model: PreTrainedModel = AutoModel.from_pretrained(
            directory, local_files_only=True, use_safetensors=True
        )
        engine = cls(
            model.to(place).eval(),  # type: ignore[arg-type]
            Pooling.read(directory),
            _context(directory, model),
            max_sequences=max_sequences,
            batch_inputs=batch_inputs,
            max_batch_tokens=max_batch_tokens,
            wait_ms=wait_ms,
            margin_ms=margin_ms,
        )
        stage("warm_up")
        engine.warm_up()
        return engine

    def warm_up(self) -> None:
        """Run a few shapes. Raises the error of a model that cannot run at all."""
        with torch.inference_mode():
            for length in WARM_UP_LENGTHS:
                self._embed([[0] * min(length, self._limits.tokens)] * 4)

    def add(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self._jobs, f"{sequence.request_id} is here already"
        if refusal := self._limits.refusal(sequence):
            self._ready.append(Output(sequence.request_id, error=refusal))
            return
        job = self._jobs[sequence.request_id] = _Job(sequence)
        self._reserved += reserved(sequence)
        now = time.monotonic()
        left = None if sequence.deadline is None else now + sequence.deadline - time.time()
        for index in range(len(sequence.inputs)):
            self._batcher.add(_Input(job, index), now, left)

    def cancel(self, request_id: str) -> None:
        if job := self._jobs.get(request_id):
            self._ready.append(self._leave(job, Output(request_id, finish="cancelled")))

    @torch.inference_mode()
    def step(self) -> list[Output]:
        if not self._planned:
            self._plan()
        outputs, self._ready = self._ready, []
        if self._planned:
            outputs += self._run(self._planned.popleft())
        return outputs

    def room(self) -> Room:
        sequences = self._max_sequences - len(self._jobs)
        return Room(max(0, sequences), max(0, self._queue_tokens - self._reserved))

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._ready

    def close(self) -> None:
        """Forget every request, and give back the memory of the weights."""
        self._jobs.clear()
        self._planned.clear()
        self._batcher.drop(lambda _: True)
        device = self._model.device
        del self._model
        memory.give_back(device)

    def _plan(self) -> None:
        """Cut the batch that is due into micro-batches; nap for a millisecond while none is."""
        now = time.monotonic()
        due = self._batcher.due_at()
        if due is not None and due > now and not self._ready:
            time.sleep(min(due - now, NAP_SECONDS))
            now = time.monotonic()
        batch = sorted(self._batcher.take(now), key=lambda i: len(i.tokens))
        self._planned.extend(_micro_batches(batch, self._max_batch_tokens))

    def _run(self, inputs: list[_Input]) -> list[Output]:
        """Embed inputs together; if that fails, each alone, so that only the culprit fails."""
        inputs = [i for i in inputs if i.job.sequence.request_id in self._jobs]
        if not inputs:
            return []
        try:
            vectors = self._embed([i.tokens for i in inputs])
        except Exception as error:  # whatever the model's code raises
            if len(inputs) == 1:
                return [self._fail(inputs[0].job, f"{type(error).__name__}: {error}")]
            return [output for i in inputs for output in self._run([i])]
        pairs = zip(inputs, vectors, strict=True)
        return [output for i, vector in pairs if (output := self._store(i, vector))]

    def _embed(self, inputs: list[list[int]]) -> Tensor:
        device = self._model.device
        rows = [torch.tensor(tokens) for tokens in inputs]
        ids = pad_sequence(rows, batch_first=True).to(device)
        lengths = torch.tensor([[len(tokens)] for tokens in inputs], device=device)
        mask = (torch.arange(ids.shape[1], device=device) < lengths).long()
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        return self._pooling(states, mask).cpu()

    def _store(self, done: _Input, vector: Tensor) -> Output | None:
        """Keep a vector; the request's output if it was the last one."""
        job = done.job
        if job.sequence.request_id not in self._jobs:  # failed by another of its inputs
            return None
        if not bool(vector.isfinite().all()):
            return self._fail(job, "the model's output is not a number")
        job.vectors[done.index] = _bytes(vector, job.sequence.dimensions)
        if len(job.vectors) < len(job.sequence.inputs):
            return None
        vectors = [job.vectors[index] for index in range(len(job.vectors))]
        output = Output(job.sequence.request_id, vectors=vectors, finish="stop")
        return self._leave(job, output)

    def _fail(self, job: _Job, reason: str) -> Output:
        error = EngineError("engine_failed", reason)
        return self._leave(job, Output(job.sequence.request_id, error=error))

    def _leave(self, job: _Job, output: Output) -> Output:
        del self._jobs[job.sequence.request_id]
        self._reserved -= reserved(job.sequence)
        self._batcher.drop(lambda i: i.job is job)
        return output


def _micro_batches(batch: list[_Input], max_tokens: int) -> list[list[_Input]]:
    """Cut inputs, sorted by length, so that rows times the longest stay within `max_tokens`."""
    batches: list[list[_Input]] = []
    for item in batch:
        if not batches or (len(batches[-1]) + 1) * len(item.tokens) > max_tokens:
            batches.append([])
        batches[-1].append(item)
    return batches


def _bytes(vector: Tensor, dimensions: int | None) -> bytes:
    """Float32 little-endian; cut to the first `dimensions` and then of length one again."""
    if dimensions is not None and dimensions < len(vector):
        vector = normalize(vector[:dimensions], dim=0)
    return vector.numpy().astype("<f4").tobytes()


def _context(directory: Path, model: PreTrainedModel) -> int:
    """The longest input: what the model was trained for, else what its positions allow."""
    path = directory / "sentence_bert_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    return int(settings.get("max_seq_length") or model.config.max_position_embeddings)
