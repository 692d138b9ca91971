"""The mock engine: deterministic words at a set pace, to measure and test everything around it.

Its text is a function of prompt and seed alone. It never samples an end: a sequence runs to its
`max_tokens` unless a stop string cuts it short.
"""

import heapq
import itertools
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from gpu_worker.engines.detokenizer import StopStringFilter
from gpu_worker.engines.engine import FinishReason, FreeCapacity, Output, Sequence
from gpu_worker.engines.sequence_limits import SequenceLimits, count_reserved_tokens
from gpu_worker.engines.simulated_prefix_cache import SimulatedPrefixCache
from simulation.step_model import StepModel
from streams import prefix_hashes
from streams.messages import Logprob, pack_tokens
from streams.subjects import Priority

VOCABULARY = 256  # the mock's tokeniser is UTF-8 bytes
DIMENSIONS = 8
NAP_SECONDS = 0.001
GROUP_SECONDS = 0.0005  # tokens due this soon join a step that happens anyway
GOLDEN = 0x9E3779B97F4A7C15  # of a Weyl sequence: equidistributed, one multiplication a token

FIRST = "ba ce di fo gu ha ke li mo nu pa re si to vu wa"
LAST = "bel can dor fin gas hum jet kin lum mar nes pol ris sun tam vex"
WORDS = tuple(first + last + " " for first in FIRST.split() for last in LAST.split())


@dataclass(slots=True, eq=False)
class _MockSequence:
    """A sequence and its position in its text."""

    sequence: Sequence
    text_origin: int
    next_index: int
    stops: StopStringFilter | None
    prefix_hashes: list[int]
    pending: int = 0  # tokens to compute before its next one, where steps are modelled
    cached: int = 0
    is_removed: bool = False


class MockEngine:
    """An engine without a model: emits words at a set pace, to test and measure the other parts.

    Each sequence's first word comes `ttft_ms` after it starts, then one every `itl_ms`. At most
    `sequences` run at once and the others wait; a more urgent one interrupts the newest of the
    least urgent. `kv_tokens` bounds the announced free capacity and the length of a sequence. The
    engine reports which prompts a prefix cache of that size would hold; they are not any faster.

    With `step_model` the pace is another: all sequences get their words at the end of a step, which
    takes as long as that model says for what is in it. Prompts are computed in steps first, in
    pieces if need be. Sequences and KV tokens are those of the model.

    `clock` returns seconds and `sleep` waits for some.
    """

    preempts = True

    def __init__(
        self,
        ttft_ms: float = 20.0,
        itl_ms: float = 6.0,
        sequences: int = 256,
        kv_tokens: int = 1_000_000,
        step_model: StepModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ttft, self._itl = ttft_ms / 1000, itl_ms / 1000
        self._step_model, self._step_ends = step_model, 0.0
        if step_model:
            sequences, kv_tokens = step_model.max_sequences, step_model.kv_tokens
        self._free, self._kv_tokens, self._reserved = sequences, kv_tokens, 0
        self._prefix_cache = SimulatedPrefixCache(kv_tokens)
        self._limits = SequenceLimits(VOCABULARY, kv_tokens, grammars=False)
        self._clock, self._sleep = clock, sleep
        self._sequences: dict[str, _MockSequence] = {}
        self._waiting: deque[_MockSequence] = deque()
        self._running: dict[str, _MockSequence] = {}  # oldest first
        self._due: list[tuple[float, int, _MockSequence]] = []
        self._order = itertools.count()
        self._ready: list[Output] = []

    @classmethod
    def load(
        cls,
        directory: Path | None = None,
        *,
        ttft_ms: float = 20.0,
        itl_ms: float = 6.0,
        sequences: int = 256,
        kv_tokens: int = 1_000_000,
        step_model: StepModel | None = None,
    ) -> "MockEngine":
        """Return a mock engine. `directory`, which every engine's `load` takes, is ignored."""
        return cls(ttft_ms, itl_ms, sequences, kv_tokens, step_model)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence. One that cannot run comes back from the next `step` with an error."""
        assert sequence.request_id not in self._sequences, f"{sequence.request_id} is here already"
        if refusal := self._limits.find_refusal(sequence):
            self._ready.append(Output(sequence.request_id, error=refusal))
            return
        state = _start_sequence(sequence)
        if finish := _finish_reason(state):
            end = Output(sequence.request_id, finish=finish, matched_stop=_matched_stop(state))
            self._ready.append(end)
            return
        self._sequences[sequence.request_id] = state
        self._reserved += count_reserved_tokens(state.sequence)
        self._waiting.append(state)
        self._admit()

    def cancel(self, request_id: str) -> None:
        """Drop a sequence; the next `step` returns its `cancelled` output. Idempotent."""
        if state := self._sequences.get(request_id):
            held = state.stops.flush() if state.stops else ""
            end = Output(request_id, text=held, finish="cancelled", cached=state.cached)
            self._ready.append(end)
            self._remove(state)

    def step(self) -> list[Output]:
        """Emit one word of each sequence that is due, and return these outputs.

        If none is due, sleeps up to a millisecond first; the list may then be empty.
        """
        if self._step_model:
            self._begin_step(self._step_model)
        if not self._ready:
            self._nap()
        outputs, self._ready = self._ready, []
        now = self._clock()
        for due, state in self._pop_due(now):
            outputs.append(self._emit_word(state))
            if not state.is_removed and not self._step_model:
                self._schedule_next(_time_after(due, self._itl, now), state)
        return outputs

    def free_capacity(self) -> FreeCapacity:
        """Return the sequences that could start at once, and the KV tokens not reserved."""
        free = self._free - len(self._waiting)
        return FreeCapacity(max(0, free), max(0, self._kv_tokens - self._reserved))

    def cached_prefix_hashes(self) -> list[int]:
        """Return the hashes of prompt prefixes that would be cached, least recently used first."""
        return self._prefix_cache.cached_prefix_hashes()

    @property
    def idle(self) -> bool:
        """True when there is no sequence and no output to return."""
        return not self._sequences and not self._ready

    def close(self) -> None:
        """Drop every sequence; none of them gets an output."""
        self._sequences.clear()
        self._waiting.clear()
        self._running.clear()
        self._due.clear()

    def _admit(self) -> None:
        while self._waiting:
            state = min(self._waiting, key=_priority_rank)  # among equals the first
            if self._free <= 0 and not self._preempt_for(state):
                return
            self._waiting.remove(state)
            self._free -= 1
            self._running[state.sequence.request_id] = state
            state.cached = state.cached or self._prefix_cache.match_prefix(state.prefix_hashes)
            if self._step_model:
                self._await_step(state)
            else:
                self._schedule_next(self._clock() + self._ttft, state)

    def _await_step(self, state: _MockSequence) -> None:
        state.pending = _computed_tokens(state)
        if len(self._running) == 1:  # no step is under way
            self._step_ends = self._clock()

    def _begin_step(self, model: StepModel) -> None:
        """Begin the next step if the last one has ended: its words are due when it ends."""
        now = self._clock()
        if now < self._step_ends or not self._running:
            return
        taken = [state for state in self._running.values() if not state.pending]
        decoding, context = len(taken), sum(map(_computed_tokens, taken))
        spare = max(1, model.max_batch_tokens - decoding)
        prefilled = 0
        for state in [each for each in self._running.values() if each.pending]:
            count = min(state.pending, spare - prefilled)
            state.pending, prefilled = state.pending - count, prefilled + count
            if not state.pending:
                taken.append(state)
        seconds = model.step_seconds(decoding, context, prefilled)
        self._step_ends = _time_after(self._step_ends, seconds, now)
        for state in taken:
            self._schedule_next(self._step_ends, state)

    def _preempt_for(self, state: _MockSequence) -> bool:
        """Preempt the newest of the least urgent running sequences, if it is less urgent."""
        last = max(reversed(self._running.values()), key=_priority_rank, default=state)
        if _priority_rank(last) <= _priority_rank(state):
            return False
        del self._running[last.sequence.request_id]
        last.is_removed = True  # where it was due
        again = replace(last, is_removed=False)
        self._sequences[again.sequence.request_id] = again
        self._waiting.appendleft(again)
        self._free += 1
        return True

    def _remove(self, state: _MockSequence) -> None:
        del self._sequences[state.sequence.request_id]
        self._reserved -= count_reserved_tokens(state.sequence)
        state.is_removed = True
        if state in self._waiting:
            self._waiting.remove(state)
            return
        del self._running[state.sequence.request_id]
        self._free += 1
        self._admit()

    def _schedule_next(self, due: float, state: _MockSequence) -> None:
        heapq.heappush(self._due, (due, next(self._order), state))

    def _nap(self) -> None:
        next_at = self._due[0][0] if self._due else self._step_ends
        wait = next_at - self._clock() if self._due or self._running else NAP_SECONDS
        if wait > 0:
            self._sleep(min(wait, NAP_SECONDS))

    def _pop_due(self, now: float) -> list[tuple[float, _MockSequence]]:
        """Remove the sequences that are due, and then those due within `GROUP_SECONDS`."""
        taken: list[tuple[float, _MockSequence]] = []
        until = now
        while self._due and self._due[0][0] <= until:
            due, _, state = heapq.heappop(self._due)
            if not state.is_removed:
                taken.append((due, state))
                until = now + GROUP_SECONDS
        return taken

    def _emit_word(self, state: _MockSequence) -> Output:
        sequence = state.sequence
        if sequence.inputs:
            self._remove(state)
            vectors = [_fake_vector(i, sequence.dimensions or DIMENSIONS) for i in sequence.inputs]
            return Output(sequence.request_id, vectors=vectors, finish="stop")
        self._prefix_cache.insert(state.prefix_hashes)
        state.prefix_hashes = []
        token = _token_at(state.text_origin, state.next_index)
        state.next_index += 1
        word = "" if _is_stop_token(state) else WORDS[token]
        text = state.stops.push(word) if state.stops else word
        finish = _finish_reason(state)
        if finish:
            self._remove(state)
            text += state.stops.flush() if state.stops else ""
        logprobs = _fake_logprobs(token, sequence.sampling.logprobs)
        output = Output(sequence.request_id, [token], text, logprobs)
        if not finish:
            return output
        matched = _matched_stop(state)
        return replace(output, finish=finish, cached=state.cached, matched_stop=matched)


def _start_sequence(sequence: Sequence) -> _MockSequence:
    """A sequence that continues behind its `generated` tokens, whose text was stored already."""
    stops = StopStringFilter(sequence.sampling.stop) if sequence.sampling.stop else None
    if stops:
        for token in sequence.generated:
            stops.push(WORDS[token])
    origin = _text_origin(sequence.prompt, sequence.sampling.seed or 0)
    packed = pack_tokens(sequence.prompt)
    prompt = prefix_hashes.hash_prompt(packed, prefix_hashes.make_salt(sequence.tenant))
    return _MockSequence(sequence, origin, len(sequence.generated), stops, prompt)


def _time_after(earlier: float, seconds: float, now: float) -> float:
    """The time `seconds` after an earlier one; after `now`, if that time is past already."""
    return earlier + seconds if earlier + seconds > now else now + seconds


def _computed_tokens(state: _MockSequence) -> int:
    """Tokens of a sequence whose KV an engine would have: of its prompt or inputs, and its text."""
    sequence = state.sequence
    return len(sequence.prompt) + sum(map(len, sequence.inputs)) + state.next_index


def _priority_rank(state: _MockSequence) -> int:
    """Rank of a sequence's priority; a smaller number is more urgent."""
    return list(Priority).index(state.sequence.priority)


def _finish_reason(state: _MockSequence) -> FinishReason | None:
    if _matched_stop(state) or _is_stop_token(state):
        return "stop"
    done = state.next_index >= state.sequence.sampling.max_tokens and not state.sequence.inputs
    return "length" if done else None


def _matched_stop(state: _MockSequence) -> str:
    """The stop string that has ended the text; empty if none has."""
    return state.stops.matched if state.stops else ""


def _is_stop_token(state: _MockSequence) -> bool:
    """True if the last token is one of the request's `stop_token_ids`, and not too early."""
    sampling = state.sequence.sampling
    if not sampling.stop_token_ids or state.next_index <= sampling.min_tokens:
        return False
    last = _token_at(state.text_origin, state.next_index - 1)
    return state.next_index > 0 and last in sampling.stop_token_ids


def _text_origin(prompt: list[int], seed: int) -> int:
    digest = blake2b(b"%d:" % seed + pack_tokens(prompt), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _token_at(origin: int, index: int) -> int:
    return (origin + index * GOLDEN >> 56) % VOCABULARY


def _fake_logprobs(token: int, top: int | None) -> list[Logprob] | None:
    if top is None:
        return None
    others = [(token + i) % VOCABULARY for i in range(top)]
    likeliest = [(other, WORDS[other], -0.5 - i) for i, other in enumerate(others)]
    return [Logprob(token, WORDS[token], -0.5, likeliest)]


def _fake_vector(tokens: list[int], dimensions: int) -> bytes:
    """A unit vector that depends on the tokens alone, as float32 little-endian."""
    origin = _text_origin(tokens, 0)
    values = [_token_at(origin, i) / VOCABULARY - 0.498 for i in range(dimensions)]
    length = sum(v * v for v in values) ** 0.5
    return struct.pack(f"<{dimensions}f", *(v / length for v in values))
