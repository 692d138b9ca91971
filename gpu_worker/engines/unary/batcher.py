"""When a batch is due: it is full, waiting for more would not pay, or somebody's time runs out.

Waiting is never free: who waits is delayed, and an engine that could run stands still. What it may
bring is one micro-batch instead of two, whose fixed cost `a` is then paid once. So, with `n` inputs
waiting, the next arrival expected within `g` seconds, and `c` seconds of computing added by it,

    wait for it only while  g + n * (g + c) < a

since it saves the newcomer `a - g` and makes the others `g + c` later. When it has not come after
`(a - n * c) / (n + 1)` seconds, waiting has ceased to pay. None waits longer than its own time
allows: `latest - compute - margin`, where `latest` is its deadline or what its latency goal says,
and `compute` what everything that waits will take. Pure.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpu_worker.engines.unary.batch_time_model import BatchTimeModel

T = TypeVar("T")
_NEWEST_WEIGHT = 0.2  # the weight of the newest arrival in the averages


@dataclass
class ArrivalRate:
    """How far apart work comes and how much at a time: averages that forget."""

    mean_gap: float = float("inf")
    mean_tokens: float = 0.0
    last_at: float = -float("inf")

    def add(self, tokens: int, now: float) -> None:
        gap = now - self.last_at
        self.mean_gap = (
            gap
            if self.mean_gap == float("inf")
            else self.mean_gap + _NEWEST_WEIGHT * (gap - self.mean_gap)
        )
        self.mean_tokens += (_NEWEST_WEIGHT if self.mean_tokens else 1.0) * (
            tokens - self.mean_tokens
        )
        self.last_at = now


@dataclass(frozen=True)
class _BatchItem(Generic[T]):
    item: T
    tokens: int
    latest: float


class Batcher(Generic[T]):
    """Collect items into batches of at most `size`, those whose time runs out first going first.

    Items whose times are the same leave as they came. A batch of `max_tokens` is full too: it is a
    whole micro-batch. All times are the caller's, in seconds of any one clock.
    """

    def __init__(self, size: int, max_tokens: int, compute: BatchTimeModel, margin: float) -> None:
        assert size > 0, f"a batch of {size} holds nothing"
        self._size, self._max_tokens = size, max_tokens
        self._compute, self._margin = compute, margin
        self._entries: list[_BatchItem[T]] = []  # in the order of leaving
        self._tokens = 0
        self._arrivals = ArrivalRate()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, items: Iterable[tuple[T, int]], now: float, latest: float | None = None) -> None:
        """Items that came together, with their tokens; their results are wanted by `latest`."""
        by = float("inf") if latest is None else latest
        made = [_BatchItem(item, tokens, by) for item, tokens in items]
        self._entries += made
        self._entries.sort(key=lambda entry: entry.latest)  # quick: the rest is in order already
        tokens = sum(entry.tokens for entry in made)
        self._tokens += tokens
        self._arrivals.add(tokens, now)

    def due_at(self) -> float | None:
        """When the next batch is due: in the past when it is full, None when there is nothing."""
        if not self._entries:
            return None
        if len(self._entries) >= self._size or self._tokens >= self._max_tokens:
            return -float("inf")
        begin = self._entries[0].latest - self._compute.predict_seconds(self._tokens) - self._margin
        return min(self._arrivals.last_at + self.compute_useful_wait(), begin)

    def pop_due(self, now: float) -> list[T]:
        """The next batch; empty while none is due."""
        due = self.due_at()
        if due is None or due > now:
            return []
        taken, self._entries = self._entries[: self._size], self._entries[self._size :]
        self._tokens -= sum(entry.tokens for entry in taken)
        return [entry.item for entry in taken]

    def remove_if(self, unwanted: Callable[[T], bool]) -> None:
        """Forget items that are no longer wanted."""
        self._entries = [e for e in self._entries if not unwanted(e.item)]
        self._tokens = sum(entry.tokens for entry in self._entries)

    def compute_useful_wait(self) -> float:
        """How long after an arrival the next one is worth waiting for; 0 if it will not come."""
        waiting, arrivals = len(self._entries), self._arrivals
        delay = waiting * self._compute.per_token * arrivals.mean_tokens
        patience = max(0.0, self._compute.overhead - delay) / (waiting + 1)
        return patience if arrivals.mean_gap < patience else 0.0
