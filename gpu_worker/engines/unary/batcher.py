"""Dynamic batching: a batch is due when it is full, when waiting no longer pays, or in time.

Waiting delays the inputs that wait and leaves the engine idle. It may save one micro-batch, since
inputs that run together pay the fixed cost `a` once. So, with `n` inputs waiting, the next arrival
expected within `g` seconds, and `c` seconds of computing added by it,

    wait for it only while  g + n * (g + c) < a

since that saves the newcomer `a - g` and delays each of the others by `g + c`. If it has not
come after `(a - n * c) / (n + 1)` seconds, waiting no longer pays. No input waits beyond
`latest - compute - margin`, where `latest` is its deadline or the time by which its latency goal
wants it, and `compute` is the time that everything that waits will take. Pure.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpu_worker.engines.unary.batch_time_model import BatchTimeModel

T = TypeVar("T")
_NEWEST_WEIGHT = 0.2  # the weight of the newest arrival in the averages


@dataclass
class ArrivalRate:
    """Moving averages of the seconds between arrivals and of the tokens of each arrival.

    Several inputs that come together are one arrival. `mean_gap` is infinite before the second.
    """

    mean_gap: float = float("inf")
    mean_tokens: float = 0.0
    last_at: float = -float("inf")

    def add(self, tokens: int, now: float) -> None:
        """Count an arrival of `tokens` tokens at `now`, in seconds of any one clock."""
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
    """Collects items (one input of a request each) and says when they are due as one batch.

    A batch has at most `size` items, those with the earliest `latest` first; among equals the order
    of arrival stays. It is full at `size` items or `max_tokens` tokens. `margin` is the seconds by
    which a batch begins early to be done in time. All times are passed in by the caller, in seconds
    of any one clock.
    """

    def __init__(
        self, size: int, max_tokens: int, time_model: BatchTimeModel, margin: float
    ) -> None:
        assert size > 0, f"a batch of {size} holds nothing"
        self._size, self._max_tokens = size, max_tokens
        self._time_model, self._margin = time_model, margin
        self._entries: list[_BatchItem[T]] = []  # in the order in which they will leave
        self._tokens = 0
        self._arrivals = ArrivalRate()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, items: Iterable[tuple[T, int]], now: float, latest: float | None = None) -> None:
        """Add items that arrived together at `now`, each with its number of tokens.

        Their results are wanted by `latest`; None means that they have no such time.
        """
        latest_or_never = float("inf") if latest is None else latest
        new_entries = [_BatchItem(item, tokens, latest_or_never) for item, tokens in items]
        self._entries += new_entries
        self._entries.sort(key=lambda entry: entry.latest)  # fast, since the rest is sorted already
        tokens = sum(entry.tokens for entry in new_entries)
        self._tokens += tokens
        self._arrivals.add(tokens, now)

    def due_at(self) -> float | None:
        """Return the time at which the next batch is due; None without items.

        That is minus infinity (at once) if the batch is full. Otherwise it is the time at which
        waiting for another arrival costs more than it saves, or the time at which the batch has to
        begin to be done by its earliest `latest`, whichever is sooner.
        """
        if not self._entries:
            return None
        if len(self._entries) >= self._size or self._tokens >= self._max_tokens:
            return -float("inf")
        start_by = (
            self._entries[0].latest - self._time_model.predict_seconds(self._tokens) - self._margin
        )
        return min(self._arrivals.last_at + self.compute_useful_wait(), start_by)

    def pop_due(self, now: float) -> list[T]:
        """Remove and return the items of the next batch; an empty list if none is due at `now`."""
        due = self.due_at()
        if due is None or due > now:
            return []
        batch, self._entries = self._entries[: self._size], self._entries[self._size :]
        self._tokens -= sum(entry.tokens for entry in batch)
        return [entry.item for entry in batch]

    def remove_if(self, is_unwanted: Callable[[T], bool]) -> None:
        """Remove the waiting items for which `is_unwanted` returns true."""
        self._entries = [e for e in self._entries if not is_unwanted(e.item)]
        self._tokens = sum(entry.tokens for entry in self._entries)

    def compute_useful_wait(self) -> float:
        """Return for how many seconds after an arrival it pays to wait for the next one.

        0 if the next one is not expected within that time, by the mean gap between arrivals.
        """
        waiting, arrivals = len(self._entries), self._arrivals
        delay = waiting * self._time_model.per_token * arrivals.mean_tokens
        patience = max(0.0, self._time_model.overhead - delay) / (waiting + 1)
        return patience if arrivals.mean_gap < patience else 0.0
