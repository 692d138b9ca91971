"""The paged engine without its model: real scheduler, real KV blocks, steps of a modelled length.

The mock engine of `gpu_worker` emits each token at its own time, however many sequences state. Here
waiting, preemption and resumption of sequences are decided as on a GPU.
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
    """A sequence, its scheduler state, and the count of tokens computed for it, with repeats."""

    sequence: Sequence
    state: SequenceState
    computed: int = 0

    @property
    def generated(self) -> int:
        return len(self.state.tokens) - len(self.sequence.prompt)

    @property
    def is_complete(self) -> bool:
        return self.generated >= self.sequence.sampling.max_tokens


class SteppedEngine:
    """An `Engine` whose steps take as long as `model` says; its output is meaningless."""

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
        self.step_tokens: dict[str, int] = {}

    @classmethod
    def load(cls, directory: Path | None = None, *, model: StepModel) -> "SteppedEngine":
        """Return an engine with this step model; `directory` is not used."""
        return cls(model)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that is over the limits ends with an error at the next step."""
        if refusal := self._limits.find_refusal(sequence):
            self._ready.append(Output(sequence.request_id, error=refusal))
            return
        tokens = sequence.prompt + sequence.generated
        state = SequenceState(sequence.request_id, tokens, priority=sequence.priority)
        self._generations[sequence.request_id] = _RunningSequence(sequence, state)
        self._scheduler.add(state)

    def cancel(self, request_id: str) -> None:
        """End a sequence as `cancelled` at the next step; ids that are not running are ignored."""
        if generation := self._generations.get(request_id):
            self._ready.append(Output(request_id, finish="cancelled"))
            self._remove(generation)

    def step(self) -> list[Output]:
        """Run one step of the batch and return its outputs after the modelled time of the step."""
        outputs, self._ready = self._ready, []
        began = self._clock()
        slices = self._scheduler.schedule()
        self.step_tokens = {piece.state.request_id: piece.count for piece in slices}
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
        """Return the sequences and tokens that are not reserved, as the paged engine does."""
        model, running = self._model, self._generations.values()
        tokens = model.kv_tokens - sum(count_reserved_tokens(each.sequence) for each in running)
        return FreeCapacity(max(0, model.max_sequences - len(running)), max(0, tokens))

    @property
    def idle(self) -> bool:
        """True while there are neither sequences nor outputs."""
        return not self._generations and not self._ready

    def close(self) -> None:
        """Drop all sequences."""
        self._generations.clear()

    def _seconds(self, slices: list[SequenceSlice]) -> float:
        decoding = [piece for piece in slices if piece.is_decode]
        prefill = sum(piece.count for piece in slices if not piece.is_decode)
        return self._model.step_seconds(len(decoding), sum(p.end for p in decoding), prefill)

    def _emit_token(self, state: SequenceState) -> Output:
        generation = self._generations[state.request_id]
        token = generation.generated % VOCABULARY
        state.tokens.append(token)
        if generation.is_complete:
            self._remove(generation)
            return Output(state.request_id, [token], WORDS[token], finish="length")
        return Output(state.request_id, [token], WORDS[token])

    def _remove(self, generation: _RunningSequence) -> None:
        state = generation.state
        self._scheduler.remove(state)
        del self._generations[state.request_id]
        log.info("computed", request_id=state.request_id, tokens=generation.computed)
