"""Who runs in the next step, and how far: by priority, in chunks, under a budget.

Runs of one priority keep the order of their arrival, running before waiting. When blocks run out
the newest of the lowest priority gives way: it loses its KV, returns to the head of its priority,
and is computed again later, once the others have room to go on for a while: it would soon give way
again otherwise. Who waits may take the place of lower priorities, never of its own. When memory for
a step runs out the budget of a step is halved, and recovers slowly. A step with an urgent prompt
has no more of less urgent ones than of it, or a third of the budget: its first token waits for all
of the step.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpu_worker.engines.paged.cache import Cache
from gpu_worker.engines.paged.run import Run, Slice
from streams.subjects import Priority

LESS_URGENT = 1 / 3  # of the budget: a step's share of less urgent prompts beside an urgent one
RETURN_STEPS = 64  # that the others can go on for when one returns that gave way
RECOVERY_STEPS = 64  # that fit, before a lowered budget grows again
RECOVERY_PARTS = 16  # by a sixteenth of itself


@dataclass(frozen=True)
class _Line:
    """The runs of one priority, each part in order of arrival; all that run came before."""

    running: list[Run] = field(default_factory=list)
    waiting: deque[Run] = field(default_factory=deque)


class Scheduler:
    """Plan steps of at most `max_batch_tokens` over at most `max_sequences` runs at once.

    Every run must fit the blocks alone; then the oldest of the highest priority always makes
    progress, and so all do once nobody of a higher one arrives.
    """

    def __init__(self, cache: Cache, max_sequences: int, max_batch_tokens: int) -> None:
        if max_batch_tokens <= max_sequences:
            raise ValueError(
                f"max_batch_tokens {max_batch_tokens} must be above max_sequences {max_sequences}: "
                "every running sequence takes one, and prefill needs some"
            )
        self._cache = cache
        self._max_sequences, self._max_batch_tokens = max_sequences, max_batch_tokens
        self.budget = max_batch_tokens  # of the next step
        self._good_steps = 0
        self._spare = 0  # tokens of the step being planned that no decoding run needs
        self._lines = {priority: _Line() for priority in Priority}  # most urgent first
        self.count_anew()

    def count_anew(self) -> None:
        """Set the counters to zero."""
        self.preemptions = self.hit_tokens = self.query_tokens = 0

    @property
    def max_running(self) -> int:
        """Runs at once: each takes a token of every step."""
        return min(self._max_sequences, self.budget)

    @property
    def running(self) -> list[Run]:
        """Most urgent first, then oldest first; so is `waiting`."""
        return [run for line in self._lines.values() for run in line.running]

    @property
    def waiting(self) -> list[Run]:
        return [run for line in self._lines.values() for run in line.waiting]

    @property
    def idle(self) -> bool:
        return not any(line.running or line.waiting for line in self._lines.values())

    def add(self, run: Run) -> None:
        self._lines[run.priority].waiting.append(run)

    def remove(self, run: Run) -> None:
        """Drop a run, whatever it is doing; its blocks are free again."""
        self._forget(run)
        self._cache.release(run)

    def discard(self, run: Run) -> None:
        """Drop a run whose KV may be bad."""
        self._forget(run)
        self._cache.discard(run)

    def schedule(self) -> list[Slice]:
        """The slices of the next step: one token for each decoding run, then chunks of prefill."""
        while self._count > self.budget:
            self._preempt(self._newest())
        self._spare = self.budget - sum(run.pending == 1 for run in self.running)
        slices: list[Slice] = []
        held_up = False
        for line in self._lines.values():
            before = self._spare
            slices += self._continue(line)
            if not held_up:
                slices += self._admit(line)
            held_up = held_up or bool(line.waiting)
            if (prefill := before - self._spare) > 0:
                self._spare = min(self._spare, max(prefill, int(LESS_URGENT * self.budget)))
        return slices

    def commit(self, slices: list[Slice]) -> None:
        """The step was computed: its KV is in place, its full blocks may be shared."""
        self._recover()
        for piece in slices:
            piece.run.done = piece.end
            self._cache.commit(piece.run)

    def lower(self, slices: list[Slice]) -> bool:
        """A step did not fit the memory: halve the next one. False when it was a single token."""
        tokens = sum(piece.count for piece in slices)
        self.budget, self._good_steps = max(1, tokens // 2), 0
        return tokens > 1

    def _recover(self) -> None:
        """Try a little more once in a while: each try that fails costs a step."""
        self._good_steps += 1
        if self._good_steps % RECOVERY_STEPS == 0:
            more = max(1, self.budget // RECOVERY_PARTS)
            self.budget = min(self._max_batch_tokens, self.budget + more)

    @property
    def _count(self) -> int:
        return sum(len(line.running) for line in self._lines.values())

    def _newest(self) -> Run:
        """Who gives way first: of the running runs of the lowest priority the newest."""
        return next(line.running[-1] for line in reversed(self._lines.values()) if line.running)

    def _below(self, priority: Priority) -> Iterator[Run]:
        """The running runs of lower priorities."""
        order = list(Priority)
        for lower in order[order.index(priority) + 1 :]:
            yield from self._lines[lower].running

    def _continue(self, line: _Line) -> list[Slice]:
        slices: list[Slice] = []
        index = 0
        while index < len(line.running):  # the oldest first: who gives way is not in `slices` yet
            run = line.running[index]
            count = 1 if run.pending == 1 else min(run.pending, self._spare)
            if count and self._grow(run, run.done + count):
                slices.append(Slice.of(run, count))
                self._spare -= count if run.pending > 1 else 0
            index += 1
        return slices

    def _admit(self, line: _Line) -> list[Slice]:
        slices: list[Slice] = []
        while line.waiting and self._can_admit(line.waiting[0]) and self._restore(line.waiting[0]):
            run = line.waiting.popleft()
            line.running.append(run)
            count = min(run.pending, self._spare)
            self._cache.grow(run, run.done + count)
            slices.append(Slice.of(run, count))
            self._spare -= count
        return slices

    def _can_admit(self, run: Run) -> bool:
        """Whether the step has a token for one more run, or for this one in another's place."""
        if self._count < self.max_running:
            return self._spare > 0
        below = list(self._below(run.priority))
        return bool(below) and (self._spare > 0 or below[-1].pending == 1)

    def _restore(self, run: Run) -> bool:
        """Share what is cached of a run, and let lower priorities give way to the rest of it.

        False, and nothing has changed, when that would not be enough.
        """
        self._cache.restore(run)
        whole = len(run.tokens) + 1
        below = list(self._below(run.priority))
        if not self._cache.fits(run, whole + self._reserve(run, len(below)), below):
            self._cache.release(run)
            return False
        while self._count >= self.max_running or not self._cache.fits(run, whole):
            self._preempt(self._newest())
        if not run.gave_way:
            run.restored = run.done
            self.hit_tokens += run.done
            self.query_tokens += len(run.tokens)
        return True

    def _reserve(self, run: Run, below: int) -> int:
        """Tokens that those that do not give way to a run must keep room for when it returns."""
        return RETURN_STEPS * (self._count - below) if run.gave_way else 0

    def _grow(self, run: Run, tokens: int) -> bool:
        """Give `run` blocks for `tokens`; False when it had to give way itself."""
        while not self._cache.fits(run, tokens):
            newest = self._newest()
            self._preempt(newest)
            if newest is run:
                return False
        self._cache.grow(run, tokens)
        return True

    def _preempt(self, run: Run) -> None:
        line = self._lines[run.priority]
        line.running.remove(run)
        line.waiting.appendleft(run)
        self._spare += run.pending == 1
        self._cache.release(run)
        run.gave_way = True
        self.preemptions += 1

    def _forget(self, run: Run) -> None:
        line = self._lines[run.priority]
        if run in line.running:
            line.running.remove(run)
        else:
            line.waiting.remove(run)
