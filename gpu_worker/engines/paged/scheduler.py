"""Who runs in the next step, and how far: first come first served, in chunks, under a budget.

Runs keep the order of their arrival, running before waiting. When blocks run out the newest gives
way: it loses its KV, returns to the head of the queue, and is computed again later. When memory
for a step runs out the budget of a step is halved, and recovers slowly.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Self

from gpu_worker.engines.paged.blocks import BLOCK_TOKENS, Blocks, blocks_for, chain

RECOVERY_STEPS = 64  # that fit, before a lowered budget grows again
RECOVERY_PARTS = 16  # by a sixteenth of itself


@dataclass(eq=False)
class Run:
    """A sequence on its way: `tokens` so far; the KV of the first `done` is in `blocks`."""

    request_id: str
    tokens: list[int]
    salt: bytes = b""
    done: int = 0
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    digests: list[bytes] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next can be sampled: 1 while decoding."""
        return len(self.tokens) - self.done

    def digest(self, block: int) -> bytes:
        """The chained hash of the run's full block number `block`; computed once each."""
        while len(self.digests) <= block:
            start = len(self.digests) * BLOCK_TOKENS
            previous = self.digests[-1] if self.digests else self.salt
            self.digests.append(chain(previous, self.tokens[start : start + BLOCK_TOKENS]))
        return self.digests[block]


@dataclass(frozen=True)
class Slice:
    """Tokens `start` to `start + count` of a run, for one step.

    `samples`: they reach the run's last token, so the next one can be sampled.
    """

    run: Run
    start: int
    count: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_decode(self) -> bool:
        return self.count == 1 and self.samples

    @classmethod
    def of(cls, run: Run, count: int) -> Self:
        return cls(run, run.done, count, count == run.pending)


class Scheduler:
    """Plan steps of at most `max_batch_tokens` over at most `max_sequences` runs at once.

    Every run must fit the blocks alone; then the oldest always makes progress, and so all do.
    """

    def __init__(
        self, blocks: Blocks, max_sequences: int, max_batch_tokens: int, prefix_cache: bool = True
    ) -> None:
        if max_batch_tokens <= max_sequences:
            raise ValueError(
                f"max_batch_tokens {max_batch_tokens} must be above max_sequences {max_sequences}: "
                "every running sequence takes one, and prefill needs some"
            )
        self._blocks, self._prefix_cache = blocks, prefix_cache
        self._max_sequences, self._max_batch_tokens = max_sequences, max_batch_tokens
        self.budget = max_batch_tokens  # of the next step
        self._good_steps = 0
        self.running: list[Run] = []
        self.waiting: deque[Run] = deque()
        self.preemptions = self.hit_tokens = self.query_tokens = 0

    @property
    def max_running(self) -> int:
        """Runs at once: each takes a token of every step."""
        return min(self._max_sequences, self.budget)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, run: Run) -> None:
        self.waiting.append(run)

    def remove(self, run: Run) -> None:
        """Drop a run, whatever it is doing; its blocks are free again."""
        self._forget(run)
        self._blocks.release(run.blocks)

    def discard(self, run: Run) -> list[int]:
        """Drop a run whose KV may be bad. Returns the blocks to be zeroed before the next step."""
        self._forget(run)
        return self._blocks.discard(run.blocks)

    def schedule(self) -> list[Slice]:
        """The slices of the next step: one token for each decoding run, then chunks of prefill."""
        while len(self.running) > self.budget:
            self._preempt(self.running[-1])
        decoding = sum(run.pending == 1 for run in self.running)
        budget = self.budget - decoding
        before = self.preemptions
        slices = self._continue(budget)
        budget -= sum(s.count for s in slices if not s.is_decode)
        if self.preemptions == before:
            slices += self._admit(budget)
        return slices

    def commit(self, slices: list[Slice]) -> None:
        """The step was computed: its KV is in place, its full blocks may be shared."""
        self._recover()
        for piece in slices:
            piece.run.done = piece.end
            if self._prefix_cache:
                self._publish(piece.run)

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

    def _continue(self, budget: int) -> list[Slice]:
        slices: list[Slice] = []
        index = 0
        while index < len(self.running):  # the oldest first: who gives way is not in `slices` yet
            run = self.running[index]
            count = 1 if run.pending == 1 else min(run.pending, budget)
            if count and self._grow(run, run.done + count):
                slices.append(Slice.of(run, count))
                budget -= count if run.pending > 1 else 0
            index += 1
        return slices

    def _admit(self, budget: int) -> list[Slice]:
        slices: list[Slice] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            run = self.waiting[0]
            if not self._restore(run):
                break
            self.running.append(self.waiting.popleft())
            count = min(run.pending, budget)
            run.blocks += self._blocks.take(blocks_for(run.done + count) - len(run.blocks))
            slices.append(Slice.of(run, count))
            budget -= count
        return slices

    def _restore(self, run: Run) -> bool:
        """Share what is cached of a run; False, and nothing shared, when the rest does not fit."""
        run.blocks = self._hits(run) if self._prefix_cache else []
        if blocks_for(len(run.tokens) + 1) - len(run.blocks) > self._blocks.available:
            self._blocks.release(run.blocks)
            run.blocks = []
            return False
        run.published = len(run.blocks)
        run.done = run.published * BLOCK_TOKENS
        self.hit_tokens += run.done
        self.query_tokens += len(run.tokens)
        return True

    def _hits(self, run: Run) -> list[int]:
        """Cached blocks from the start, never all: the last token is computed for its logits."""
        blocks: list[int] = []
        for index in range((len(run.tokens) - 1) // BLOCK_TOKENS):
            block = self._blocks.hit(run.digest(index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _grow(self, run: Run, tokens: int) -> bool:
        """Give `run` blocks for `tokens`; False when it had to give way itself."""
        need = blocks_for(tokens) - len(run.blocks)
        while need > self._blocks.available:
            newest = self.running[-1]
            self._preempt(newest)
            if newest is run:
                return False
        run.blocks += self._blocks.take(need)
        return True

    def _preempt(self, run: Run) -> None:
        self.running.remove(run)
        self.waiting.appendleft(run)
        self._blocks.release(run.blocks)
        run.blocks, run.done, run.published = [], 0, 0
        self.preemptions += 1

    def _publish(self, run: Run) -> None:
        for index in range(run.published, run.done // BLOCK_TOKENS):
            self._blocks.publish(run.blocks[index], run.digest(index))
        run.published = run.done // BLOCK_TOKENS

    def _forget(self, run: Run) -> None:
        if run in self.running:
            self.running.remove(run)
        else:
            self.waiting.remove(run)
