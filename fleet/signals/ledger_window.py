"""Counts of what the ledger has stored in its last seconds, by model and priority. Pure.

Messages count from the second in which the broker stored them, for as long as the window is. So
whoever reads the ledger's last seconds has the same counts, whatever died before. All are whole
numbers, added when they come and taken off when they leave.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

from streams.messages import LedgerRecord, RefusalCounts

# Of refusals that more workers would have spared; others, as of quotas, are none of their business
CAPACITY_CODES = frozenset({"overloaded", "tenant_backlog", "no_workers", "queue_full"})
_CLIENT_LEFT = "cancelled"


class ModelPriority(NamedTuple):
    """A model and a priority."""

    model: str
    priority: str


class PriorityCounts(NamedTuple):
    """Counts of one model and priority: by outcome, by error code, and of what is measured."""

    ended: Counter[str]
    refused: Counter[str]
    measured: Counter[str]  # tokens, goals, and milliseconds in the queue

    @property
    def refused_for_capacity(self) -> int:
        """Number of refused requests that more workers would have served."""
        return sum(self.refused[code] for code in CAPACITY_CODES)

    @property
    def mean_queue_seconds(self) -> float | None:
        """Mean queue time of requests that ended in one attempt; None if there are none."""
        count = self.measured["queue_count"]
        return self.measured["queue_ms"] / count / 1000 if count else None


class _Second(NamedTuple):
    at: int
    counts: dict[ModelPriority, PriorityCounts]


def _no_counts() -> PriorityCounts:
    return PriorityCounts(Counter(), Counter(), Counter())


class LedgerWindow:
    """The counts of the last `window_seconds` (whole seconds) before the last call of `expire`.

    Feed it in the ledger's order; times are when the broker has stored a message, in epoch seconds.
    """

    def __init__(self, window_seconds: int) -> None:
        self._window_seconds = window_seconds
        self._seconds: deque[_Second] = deque()
        self._totals = defaultdict[ModelPriority, PriorityCounts](_no_counts)

    def add_record(self, record: LedgerRecord, stored_at: float) -> None:
        """Count a request that has ended."""
        measured = Counter(
            prompt_tokens=record.prompt_tokens, completion_tokens=record.completion_tokens
        )
        if found := judge_goal(record):
            measured[found] = 1
        if record.attempts == 1 and record.worker_ms:
            waited = record.finished - record.accepted - record.worker_ms
            measured.update(queue_count=1, queue_ms=max(0, waited))
        key = ModelPriority(record.model, record.priority)
        self._add(key, PriorityCounts(Counter({record.outcome: 1}), Counter(), measured), stored_at)

    def add_refusals(self, refusals: RefusalCounts, stored_at: float) -> None:
        """Count what a gateway has refused."""
        for code, _, priority, count in refusals.counts:
            key = ModelPriority(refusals.model, priority)
            refused = PriorityCounts(Counter(), Counter({code: count}), Counter())
            self._add(key, refused, stored_at)

    def _add(self, key: ModelPriority, counts: PriorityCounts, stored_at: float) -> None:
        second = int(stored_at)
        if not self._seconds or self._seconds[-1].at < second:
            self._seconds.append(_Second(second, defaultdict(_no_counts)))
        for kept in (self._seconds[-1].counts, self._totals):
            for known, more in zip(kept[key], counts, strict=True):
                known.update(more)

    def expire(self, now: float) -> None:
        """Take off what was stored before the window that ends at `now` (epoch seconds)."""
        while self._seconds and self._seconds[0].at < int(now) - self._window_seconds:
            for key, counts in self._seconds.popleft().counts.items():
                self._subtract(key, counts)

    def _subtract(self, key: ModelPriority, counts: PriorityCounts) -> None:
        totals = self._totals[key]
        for known, less in zip(totals, counts, strict=True):
            known.subtract(less)
            for name in [name for name in less if not known[name]]:
                del known[name]
        if not any(totals):
            del self._totals[key]

    def seen(self) -> Iterable[ModelPriority]:
        """Return each model and priority of which something is in the window."""
        return self._totals.keys()

    def counts_of(self, key: ModelPriority) -> PriorityCounts:
        """Return the counts of a model and priority; they are not to be changed."""
        return self._totals.get(key) or _no_counts()


def judge_goal(record: LedgerRecord) -> str | None:
    """Return whether a request kept its goal for the time to first token.

    `attained`, `missed`, or `left` if its client left before the goal was due; None for a request
    without a goal.
    """
    if record.goal_ms is None:
        return None
    if record.first:
        return "attained" if record.first - record.accepted <= record.goal_ms else "missed"
    left_in_time = record.finished - record.accepted <= record.goal_ms
    return "left" if record.outcome == _CLIENT_LEFT and left_in_time else "missed"
