"""Who runs in the next step, and how far: by priority, in chunks, under a budget.

Runs of one priority keep the order of their arrival, running before waiting. When blocks run out
the newest of the lowest priority gives way: it loses its KV, returns to the head of its priority,
and is computed again later, once the others have room to go on for a while: it would soon give way
again otherwise. Who waits may take the place of lower priorities, never of its own. When memory for
a step runs out the budget of a step is halved, and recovers slowly. A step with an urgent prompt
has no more of less urgent ones than of it, or a third of the budget: its first token waits for all
of the step. Pure.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpu_worker.engines.paged.batch.kv_cache_manager import KvCacheManager
from gpu_worker.engines.paged.batch.sequence_state import SequenceSlice, SequenceState
from streams.subjects import Priority

# Of the token budget: a step's share of less urgent prompts beside an urgent one.
LESS_URGENT_SHARE = 1 / 3
RETURN_STEPS = 64  # that the others can go on for when one returns that gave way
RECOVERY_STEPS = 64  # that fit, before a lowered budget grows again
RECOVERY_PARTS = 16  # by a sixteenth of itself


@dataclass(frozen=True)
class _PriorityLevel:
    """The runs of one priority, each part in order of arrival; all that run came before."""

    running: list[SequenceState] = field(default_factory=list)
    waiting: deque[SequenceState] = field(default_factory=deque)


class Scheduler:
    """Plan steps of at most `max_batch_tokens` over at most `max_sequences` runs at once.

    Every run must fit the blocks alone; then the oldest of the highest priority always makes
    progress, and so all do once nobody of a higher one arrives.
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
        self._prefill_budget = 0  # tokens of the step being planned that no decoding run needs
        self._levels = {priority: _PriorityLevel() for priority in Priority}  # most urgent first
        self.reset_counters()

    def reset_counters(self) -> None:
        """Set the counters to zero."""
        self.preemptions = self.hit_tokens = self.query_tokens = 0

    @property
    def max_running(self) -> int:
        """Runs at once: each takes a token of every step."""
        return min(self._max_sequences, self.token_budget)

    @property
    def running(self) -> list[SequenceState]:
        """Most urgent first, then oldest first; so is `waiting`."""
        return [run for line in self._levels.values() for run in line.running]

    @property
    def waiting(self) -> list[SequenceState]:
        return [run for line in self._levels.values() for run in line.waiting]

    @property
    def idle(self) -> bool:
        return not any(line.running or line.waiting for line in self._levels.values())

    def add(self, run: SequenceState) -> None:
        self._levels[run.priority].waiting.append(run)

    def remove(self, run: SequenceState) -> None:
        """Drop a run, whatever it is doing; its blocks are free again."""
        self._unschedule(run)
        self._cache.release(run)

    def discard(self, run: SequenceState) -> None:
        """Drop a run whose KV may be bad."""
        self._unschedule(run)
        self._cache.discard(run)

    def schedule(self) -> list[SequenceSlice]:
        """The slices of the next step: one token for each decoding run, then chunks of prefill."""
        while self._running_count > self.token_budget:
            self._preempt(self._next_victim())
        self._prefill_budget = self.token_budget - sum(
            run.pending_tokens == 1 for run in self.running
        )
        slices: list[SequenceSlice] = []
        held_up = False
        for line in self._levels.values():
            before = self._prefill_budget
            slices += self._schedule_running(line)
            if not held_up:
                slices += self._admit_waiting(line)
            held_up = held_up or bool(line.waiting)
            if (prefill := before - self._prefill_budget) > 0:
                self._prefill_budget = min(
                    self._prefill_budget, max(prefill, int(LESS_URGENT_SHARE * self.token_budget))
                )
        return slices

    def commit(self, slices: list[SequenceSlice]) -> None:
        """The step was computed: its KV is in place, its full blocks may be shared."""
        self._raise_budget()
        for piece in slices:
            piece.state.computed_tokens = piece.end
            self._cache.commit(piece.state)

    def halve_budget(self, slices: list[SequenceSlice]) -> bool:
        """A step did not fit the memory: halve the next one. False when it was a single token."""
        tokens = sum(piece.count for piece in slices)
        self.token_budget, self._good_steps = max(1, tokens // 2), 0
        return tokens > 1

    def _raise_budget(self) -> None:
        """Try a little more once in a while: each try that fails costs a step."""
        self._good_steps += 1
        if self._good_steps % RECOVERY_STEPS == 0:
            more = max(1, self.token_budget // RECOVERY_PARTS)
            self.token_budget = min(self._max_batch_tokens, self.token_budget + more)

    @property
    def _running_count(self) -> int:
        return sum(len(line.running) for line in self._levels.values())

    def _next_victim(self) -> SequenceState:
        """Who gives way first: of the running runs of the lowest priority the newest."""
        return next(line.running[-1] for line in reversed(self._levels.values()) if line.running)

    def _running_below(self, priority: Priority) -> Iterator[SequenceState]:
        """The running runs of lower priorities."""
        order = list(Priority)
        for lower in order[order.index(priority) + 1 :]:
            yield from self._levels[lower].running

    def _schedule_running(self, line: _PriorityLevel) -> list[SequenceSlice]:
        slices: list[SequenceSlice] = []
        index = 0
        while index < len(line.running):  # the oldest first: who gives way is not in `slices` yet
            run = line.running[index]
            count = 1 if run.pending_tokens == 1 else min(run.pending_tokens, self._prefill_budget)
            if count and self._grow_or_preempt(run, run.computed_tokens + count):
                slices.append(SequenceSlice.next_tokens(run, count))
                self._prefill_budget -= count if run.pending_tokens > 1 else 0
            index += 1
        return slices

    def _admit_waiting(self, line: _PriorityLevel) -> list[SequenceSlice]:
        slices: list[SequenceSlice] = []
        while (
            line.waiting and self._can_admit(line.waiting[0]) and self._make_room(line.waiting[0])
        ):
            run = line.waiting.popleft()
            line.running.append(run)
            count = min(run.pending_tokens, self._prefill_budget)
            self._cache.grow(run, run.computed_tokens + count)
            slices.append(SequenceSlice.next_tokens(run, count))
            self._prefill_budget -= count
        return slices

    def _can_admit(self, run: SequenceState) -> bool:
        """Whether the step has a token for one more run, or for this one in another's place."""
        if self._running_count < self.max_running:
            return self._prefill_budget > 0
        below = list(self._running_below(run.priority))
        return bool(below) and (self._prefill_budget > 0 or below[-1].pending_tokens == 1)

    def _make_room(self, run: SequenceState) -> bool:
        """Share what is cached of a run, and let lower priorities give way to the rest of it.

        False, and nothing has changed, when that would not be enough.
        """
        self._cache.share_prefix(run)
        whole = len(run.tokens) + 1
        below = list(self._running_below(run.priority))
        if not self._cache.can_grow(run, whole + self._return_margin(run, len(below)), below):
            self._cache.release(run)
            return False
        while self._running_count >= self.max_running or not self._cache.can_grow(run, whole):
            self._preempt(self._next_victim())
        if not run.was_preempted:
            run.hit_tokens = run.computed_tokens
            self.hit_tokens += run.computed_tokens
            self.query_tokens += len(run.tokens)
        return True

    def _return_margin(self, run: SequenceState, below: int) -> int:
        """Tokens that those that do not give way to a run must keep room for when it returns."""
        return RETURN_STEPS * (self._running_count - below) if run.was_preempted else 0

    def _grow_or_preempt(self, run: SequenceState, tokens: int) -> bool:
        """Give `run` blocks for `tokens`; False when it had to give way itself."""
        while not self._cache.can_grow(run, tokens):
            newest = self._next_victim()
            self._preempt(newest)
            if newest is run:
                return False
        self._cache.grow(run, tokens)
        return True

    def _preempt(self, run: SequenceState) -> None:
        line = self._levels[run.priority]
        line.running.remove(run)
        line.waiting.appendleft(run)
        self._prefill_budget += run.pending_tokens == 1
        self._cache.release(run)
        run.was_preempted = True
        self.preemptions += 1

    def _unschedule(self, run: SequenceState) -> None:
        line = self._levels[run.priority]
        if run in line.running:
            line.running.remove(run)
        else:
            line.waiting.remove(run)
