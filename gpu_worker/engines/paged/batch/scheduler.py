"""The scheduler: which sequences the next step computes, and how many tokens of each.

Sequences of one priority are served in order of arrival, running ones before waiting ones; prompts
are computed in chunks within a token budget. When blocks run out, the newest sequence of the lowest
priority is preempted: it loses its KV, returns to the head of its priority's waiting sequences and
is computed again later. It is readmitted only when the others can go on for a while, since it would
soon be preempted again otherwise. A waiting sequence may preempt lower priorities, never its own.
When a step does not fit the memory, the token budget is halved and then recovers slowly. In a step
with an urgent prompt, less urgent prompts get no more tokens than it has, or a third of the budget
if that is more: the urgent prompt's first token waits for the whole step. Pure.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpu_worker.engines.paged.batch.kv_cache_manager import KvCacheManager
from gpu_worker.engines.paged.batch.sequence_state import SequenceSlice, SequenceState
from streams.subjects import Priority

# Share of the token budget that less urgent prompts may use beside an urgent one.
LESS_URGENT_SHARE = 1 / 3
RETURN_STEPS = 64  # steps the others must have blocks for when a preempted sequence returns
RECOVERY_STEPS = 64  # steps that must fit the memory before a lowered budget grows again
RECOVERY_PARTS = 16  # a lowered budget grows by a sixteenth of itself


@dataclass(frozen=True)
class _PriorityLevel:
    """The sequences of one priority, each list in order of arrival.

    All running sequences arrived before the waiting ones.
    """

    running: list[SequenceState] = field(default_factory=list)
    waiting: deque[SequenceState] = field(default_factory=deque)


class Scheduler:
    """Chooses the sequences of each step, and how many tokens of each the step computes.

    An engine has one: it calls `schedule` before each step, then `commit` if the step was computed
    or `halve_budget` if it ran out of memory. A step computes at most `max_batch_tokens`, and at
    most `max_sequences` run at the same time. Every sequence must fit the KV blocks alone. Then the
    oldest of the highest priority always makes progress, and so does every other sequence once no
    more of a higher priority arrive. Raises `ValueError` unless `max_batch_tokens` is above
    `max_sequences`.
    """

    def __init__(self, cache: KvCacheManager, max_sequences: int, max_batch_tokens: int) -> None:
        if max_batch_tokens <= max_sequences:
            raise ValueError(
                f"max_batch_tokens {max_batch_tokens} must be above max_sequences {max_sequences}: "
                "every running sequence takes one, and prefill needs some"
            )
        self._cache = cache
        self._max_sequences, self._max_batch_tokens = max_sequences, max_batch_tokens
        self.token_budget = max_batch_tokens  # of the next step
        self._good_steps = 0
        self._prefill_budget = 0  # of the step being scheduled: tokens left for prompts
        self._levels = {priority: _PriorityLevel() for priority in Priority}  # most urgent first
        self.reset_counters()

    def reset_counters(self) -> None:
        """Set the counters of preemptions and of prefix cache hits and queries to zero."""
        self.preemptions = self.hit_tokens = self.query_tokens = 0

    @property
    def max_running(self) -> int:
        """The most sequences that may run at once: each takes at least one token of every step."""
        return min(self._max_sequences, self.token_budget)

    @property
    def running(self) -> list[SequenceState]:
        """The running sequences, those with KV blocks: most urgent first, then oldest first."""
        return [state for level in self._levels.values() for state in level.running]

    @property
    def waiting(self) -> list[SequenceState]:
        """The waiting sequences, new or preempted: most urgent first, then oldest first."""
        return [state for level in self._levels.values() for state in level.waiting]

    @property
    def idle(self) -> bool:
        """True when no sequence runs or waits."""
        return not any(level.running or level.waiting for level in self._levels.values())

    def add(self, state: SequenceState) -> None:
        """Put a sequence behind its priority's waiting ones; a later `schedule` starts it."""
        self._levels[state.priority].waiting.append(state)

    def remove(self, state: SequenceState) -> None:
        """Drop a sequence, running or waiting, and release its blocks, which may stay cached.

        Raises `ValueError` for a sequence that the scheduler does not have.
        """
        self._unschedule(state)
        self._cache.release(state)

    def discard(self, state: SequenceState) -> None:
        """Drop a sequence whose KV may be bad, so that no other sequence shares its blocks.

        Raises `ValueError` for a sequence that the scheduler does not have.
        """
        self._unschedule(state)
        self._cache.discard(state)

    def schedule(self) -> list[SequenceSlice]:
        """Choose the next step, allocate its KV blocks, and return its slices.

        A slice is one token of a decoding sequence or a chunk of a prompt. Running sequences are
        preempted where blocks or the token budget do not suffice for all. The list is empty when no
        sequence can run.
        """
        while self._running_count > self.token_budget:
            self._preempt(self._next_victim())
        self._prefill_budget = self.token_budget - sum(
            state.pending_tokens == 1 for state in self.running
        )
        slices: list[SequenceSlice] = []
        is_held_up = False
        for level in self._levels.values():
            budget_before = self._prefill_budget
            slices += self._schedule_running(level)
            if not is_held_up:
                slices += self._admit_waiting(level)
            is_held_up = is_held_up or bool(level.waiting)
            if (prefill_tokens := budget_before - self._prefill_budget) > 0:
                self._prefill_budget = min(
                    self._prefill_budget,
                    max(prefill_tokens, int(LESS_URGENT_SHARE * self.token_budget)),
                )
        return slices

    def commit(self, slices: list[SequenceSlice]) -> None:
        """Record that the step over these slices was computed, so that its KV is in place.

        Full blocks can then be shared by other sequences. After enough such steps a lowered token
        budget grows again.
        """
        self._raise_budget()
        for seq_slice in slices:
            seq_slice.state.computed_tokens = seq_slice.end
            self._cache.commit(seq_slice.state)

    def halve_budget(self, slices: list[SequenceSlice]) -> bool:
        """Lower the token budget to half the tokens of a step that did not fit the memory.

        Returns True if the next step can be smaller, and False if this one was a single token.
        """
        tokens = sum(seq_slice.count for seq_slice in slices)
        self.token_budget, self._good_steps = max(1, tokens // 2), 0
        return tokens > 1

    def _raise_budget(self) -> None:
        """Raise a lowered token budget after `RECOVERY_STEPS` good steps.

        It rises slowly because a step that fails for lack of memory is lost.
        """
        self._good_steps += 1
        if self._good_steps % RECOVERY_STEPS == 0:
            increase = max(1, self.token_budget // RECOVERY_PARTS)
            self.token_budget = min(self._max_batch_tokens, self.token_budget + increase)

    @property
    def _running_count(self) -> int:
        return sum(len(level.running) for level in self._levels.values())

    def _next_victim(self) -> SequenceState:
        """Return the sequence to preempt first: the newest running one of the lowest priority."""
        return next(level.running[-1] for level in reversed(self._levels.values()) if level.running)

    def _running_below(self, priority: Priority) -> Iterator[SequenceState]:
        """Yield the running sequences of lower priorities than this."""
        order = list(Priority)
        for lower in order[order.index(priority) + 1 :]:
            yield from self._levels[lower].running

    def _schedule_running(self, level: _PriorityLevel) -> list[SequenceSlice]:
        slices: list[SequenceSlice] = []
        index = 0
        while index < len(level.running):  # oldest first: a preempted one is not in `slices`
            state = level.running[index]
            count = (
                1 if state.pending_tokens == 1 else min(state.pending_tokens, self._prefill_budget)
            )
            if count and self._grow_or_preempt(state, state.computed_tokens + count):
                slices.append(SequenceSlice.next_tokens(state, count))
                self._prefill_budget -= count if state.pending_tokens > 1 else 0
            index += 1
        return slices

    def _admit_waiting(self, level: _PriorityLevel) -> list[SequenceSlice]:
        slices: list[SequenceSlice] = []
        while (
            level.waiting
            and self._can_admit(level.waiting[0])
            and self._make_room(level.waiting[0])
        ):
            state = level.waiting.popleft()
            level.running.append(state)
            count = min(state.pending_tokens, self._prefill_budget)
            self._cache.grow(state, state.computed_tokens + count)
            slices.append(SequenceSlice.next_tokens(state, count))
            self._prefill_budget -= count
        return slices

    def _can_admit(self, state: SequenceState) -> bool:
        """Return whether the step has a token for the sequence, perhaps by preempting another."""
        if self._running_count < self.max_running:
            return self._prefill_budget > 0
        lower_states = list(self._running_below(state.priority))
        return bool(lower_states) and (
            self._prefill_budget > 0 or lower_states[-1].pending_tokens == 1
        )

    def _make_room(self, state: SequenceState) -> bool:
        """Share the cached prefix of a sequence and preempt lower priorities for the rest of it.

        Returns False, and changes nothing, when even that would not give it enough blocks.
        """
        self._cache.share_prefix(state)
        tokens_needed = len(state.tokens) + 1
        lower_states = list(self._running_below(state.priority))
        if not self._cache.can_grow(
            state, tokens_needed + self._return_margin(state, len(lower_states)), lower_states
        ):
            self._cache.release(state)
            return False
        while self._running_count >= self.max_running or not self._cache.can_grow(
            state, tokens_needed
        ):
            self._preempt(self._next_victim())
        if not state.was_preempted:
            state.hit_tokens = state.computed_tokens
            self.hit_tokens += state.computed_tokens
            self.query_tokens += len(state.tokens)
        return True

    def _return_margin(self, state: SequenceState, preemptible: int) -> int:
        """Return how many tokens must stay free for the others when a preempted sequence returns.

        `preemptible` of the running sequences are of lower priority and do not count.
        """
        return RETURN_STEPS * (self._running_count - preemptible) if state.was_preempted else 0

    def _grow_or_preempt(self, state: SequenceState, tokens: int) -> bool:
        """Allocate blocks for `tokens`, preempting others; False if it was preempted itself."""
        while not self._cache.can_grow(state, tokens):
            newest = self._next_victim()
            self._preempt(newest)
            if newest is state:
                return False
        self._cache.grow(state, tokens)
        return True

    def _preempt(self, state: SequenceState) -> None:
        level = self._levels[state.priority]
        level.running.remove(state)
        level.waiting.appendleft(state)
        self._prefill_budget += state.pending_tokens == 1
        self._cache.release(state)
        state.was_preempted = True
        self.preemptions += 1

    def _unschedule(self, state: SequenceState) -> None:
        level = self._levels[state.priority]
        if state in level.running:
            level.running.remove(state)
        else:
            level.waiting.remove(state)
