"""The paged engine without its model: real scheduler, real KV blocks, steps of a modelled length.

The mock of `gpu_worker` says each word at its own time, however many others talk. Who waits for
whom, who gives way and when they return is decided here as on a GPU.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from gpu_worker.engines.engine import FreeCapacity, Output, Sequence
from gpu_worker.engines.mock import VOCABULARY, WORDS
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS, blocks_for
from gpu_worker.engines.paged.batch.kv_cache_manager import KvCacheManager
from gpu_worker.engines.paged.batch.scheduler import Scheduler
from gpu_worker.engines.paged.batch.sequence_state import SequenceSlice, SequenceState
from gpu_worker.engines.sequence_limits import SequenceLimits, count_reserved_tokens
from simulation.step_model import StepModel

log = structlog.get_logger()

IDLE_SECONDS = 0.001


@dataclass(slots=True, eq=False)
class _RunningSequence:
    """A sequence, its run, and the tokens that were computed for it, once for each time."""

    sequence: Sequence
    run: SequenceState
    computed: int = 0

    @property
    def generated(self) -> int:
        return len(self.run.tokens) - len(self.sequence.prompt)

    @property
    def is_complete(self) -> bool:
        return self.generated >= self.sequence.sampling.max_tokens


class SteppedEngine:
    """An `Engine` whose steps take what `model` says; its words mean nothing."""

    preempts = True

    def __init__(
        self,
        model: StepModel,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        blocks = blocks_for(model.kv_tokens)
        cache = KvCacheManager({None: blocks}, model.max_batch_tokens, prefix_cache=False)
        self._scheduler = Scheduler(cache, model.max_sequences, model.max_batch_tokens)
        self._limits = SequenceLimits(VOCABULARY, blocks * BLOCK_TOKENS, grammars=False)
        self._model, self._clock, self._sleep = model, clock, sleep
        self._generations: dict[str, _RunningSequence] = {}
        self._ready: list[Output] = []

    @classmethod
    def load(cls, directory: Path | None = None, *, model: StepModel) -> "SteppedEngine":
        """As the other engines load."""
        return cls(model)

    def add(self, sequence: Sequence) -> None:
        if refusal := self._limits.find_refusal(sequence):
            self._ready.append(Output(sequence.request_id, error=refusal))
            return
        tokens = sequence.prompt + sequence.generated
        run = SequenceState(sequence.request_id, tokens, priority=sequence.priority)
        self._generations[sequence.request_id] = _RunningSequence(sequence, run)
        self._scheduler.add(run)

    def cancel(self, request_id: str) -> None:
        if generation := self._generations.get(request_id):
            self._ready.append(Output(request_id, finish="cancelled"))
            self._remove(generation)

    def step(self) -> list[Output]:
        """A step over the running batch; it returns when the step would be over."""
        outputs, self._ready = self._ready, []
        began = self._clock()
        slices = self._scheduler.schedule()
        if outputs and not slices:
            return outputs
        ends = began + (self._seconds(slices) if slices else IDLE_SECONDS)
        self._scheduler.commit(slices)
        for piece in slices:
            self._generations[piece.state.request_id].computed += piece.count
        outputs += [self._emit_token(piece.state) for piece in slices if piece.is_sampled]
        self._sleep(max(0.0, ends - self._clock()))
        return outputs

    def free_capacity(self) -> FreeCapacity:
        """Of what is reserved, as the paged engine tells it."""
        model, held = self._model, self._generations.values()
        tokens = model.kv_tokens - sum(count_reserved_tokens(each.sequence) for each in held)
        return FreeCapacity(max(0, model.max_sequences - len(held)), max(0, tokens))

    @property
    def idle(self) -> bool:
        return not self._generations and not self._ready

    def close(self) -> None:
        """Forget every sequence."""
        self._generations.clear()

    def _seconds(self, slices: list[SequenceSlice]) -> float:
        decoding = [piece for piece in slices if piece.is_decode]
        prefill = sum(piece.count for piece in slices if not piece.is_decode)
        return self._model.step_seconds(len(decoding), sum(p.end for p in decoding), prefill)

    def _emit_token(self, run: SequenceState) -> Output:
        generation = self._generations[run.request_id]
        token = generation.generated % VOCABULARY
        run.tokens.append(token)
        if generation.is_complete:
            self._remove(generation)
            return Output(run.request_id, [token], WORDS[token], finish="length")
        return Output(run.request_id, [token], WORDS[token])

    def _remove(self, generation: _RunningSequence) -> None:
        run = generation.run
        self._scheduler.remove(run)
        del self._generations[run.request_id]
        log.info("computed", request_id=run.request_id, tokens=generation.computed)
