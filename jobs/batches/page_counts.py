"""Counts the results of one page of RESULTS, and adds them to a batch's record."""

from dataclasses import dataclass, field, replace

from jobs.metrics import ITEMS
from streams.records.jobs.batch_records import Batch
from streams.records.jobs.item_results import ItemResult


@dataclass
class PageCounts:
    """Counts that one page of RESULTS adds to a batch's record, which is large to copy."""

    results: list[ItemResult] = field(default_factory=list)
    stored_bytes: int = 0

    def add(self, result: ItemResult) -> None:
        """Count the result of a line."""
        self.results.append(result)
        ITEMS.labels("failed" if result.code else "completed").inc()

    def add_to(self, batch: Batch, counted: int) -> Batch:
        """Return the record with this page, whose last message has the sequence `counted`."""
        failed = sum(bool(result.code) for result in self.results)
        usage = batch.usage
        for result in self.results:
            usage = usage.plus(result.usage)
        return replace(
            batch,
            completed=batch.completed + len(self.results) - failed,
            failed=batch.failed + failed,
            usage=usage,
            counted=counted,
            stored_bytes=batch.stored_bytes + self.stored_bytes,
        )
