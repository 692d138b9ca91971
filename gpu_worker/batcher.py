"""When a batch is due: it is full, its oldest item has waited enough, or a deadline comes close."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry(Generic[T]):
    item: T
    due: float


class Batcher(Generic[T]):
    """Collect items, first come first served, into batches of at most `size`.

    All times are the caller's, in seconds of any one clock. `wait` is the longest that an item
    waits for others; `margin` is kept before a deadline for the work itself.
    """

    def __init__(self, size: int, wait: float, margin: float) -> None:
        assert size > 0, f"a batch of {size} holds nothing"
        self._size, self._wait, self._margin = size, wait, margin
        self._entries: deque[_Entry[T]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, item: T, now: float, deadline: float | None = None) -> None:
        due = now + self._wait
        if deadline is not None:
            due = max(now, min(due, deadline - self._margin))
        self._entries.append(_Entry(item, due))

    def due_at(self) -> float | None:
        """When the next batch is due: in the past when it is full, None when there is nothing."""
        if not self._entries:
            return None
        return -float("inf") if self._is_full else min(e.due for e in self._entries)

    def take(self, now: float) -> list[T]:
        """The next batch, the oldest items first; empty while none is due."""
        due = self.due_at()
        if due is None or due > now:
            return []
        count = min(self._size, len(self._entries))
        return [self._entries.popleft().item for _ in range(count)]

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        """Forget items that are no longer wanted."""
        self._entries = deque(e for e in self._entries if not unwanted(e.item))

    @property
    def _is_full(self) -> bool:
        return len(self._entries) >= self._size
