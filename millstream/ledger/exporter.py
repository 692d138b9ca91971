"""Exporter: reads the ledger in order into segments, and removes from it what they hold.

Nothing is removed before the segment that has it is closed and on disk. So of a process that is
killed, the next one reads again what was in its open segment, and no record is lost or twice.
"""

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import structlog
from nats.js.errors import NotFoundError
from prometheus_client import Counter, Gauge

from millstream.ledger.export_directory import ExportDirectory
from millstream.ledger.lines import to_line
from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, StoredMessage, StoreRefused
from streams.errors import BrokerUnavailable, MillstreamError
from streams.records.usage_rollups import UsageRollups

log = structlog.get_logger()

POLL_SECONDS = 1.0
RETRY_SECONDS = 1.0
PAGE_MESSAGES = 1000  # that are read at once
URGENT_RATIO = 0.5  # of the ledger's size: from here on all that is exported is removed

EXPORTED = Counter("millstream_ledger_exported_total", "Messages of the ledger in closed segments.")
PENDING = Gauge("millstream_ledger_export_pending", "Messages of the ledger not read yet.")


class LedgerGap(MillstreamError):
    """The ledger has lost records before they were exported, or it is another one than before."""

    def __init__(self, exported: int, first: int) -> None:
        super().__init__(
            f"the last exported sequence is {exported}, and the ledger begins at {first}: what was "
            "in between is lost (it expired, was removed by somebody else, or the stream was made "
            "anew); say --accept-gap to go on behind it"
        )
        self.exported, self.first = exported, first


@dataclass(frozen=True)
class ExportPlan:
    """Options of an export: when a segment is closed, and what is removed from the ledger.

    A segment is closed at `segment_bytes`, and `segment_seconds` after its first record came.
    `keep_seconds` after that its records are removed from the ledger, at once while that is half
    full; None removes nothing.
    """

    segment_bytes: int
    segment_seconds: float
    keep_seconds: float | None = None
    accepts_gap: bool = False


class LedgerExporter:
    """Exports the ledger into one directory; call `run`, or `export_all` for what is there now."""

    def __init__(self, broker: Broker, directory: ExportDirectory, plan: ExportPlan) -> None:
        self._broker, self._directory, self._plan = broker, directory, plan
        self._rollups, self._opened_at = UsageRollups(broker), 0.0
        # Closed segments whose records are in the ledger still: when each was closed, and its last
        self._closed = deque([(time.monotonic(), directory.last)] if directory.last else [])
        self._accepts_gap = plan.accepts_gap

    async def run(self, stop: asyncio.Event) -> None:
        """Export until `stop` is set, then close the open segment.

        While the broker does not answer, this tries again. Raises `LedgerGap`, or OSError if a file
        cannot be written.
        """
        while not stop.is_set():
            seconds = POLL_SECONDS
            try:
                if await self._export_page():
                    seconds = 0.0
                await self._close_if_due()
                await self._remove_exported()
            except (BrokerUnavailable, StoreRefused, NotFoundError) as error:
                log.warning("ledger_not_exported", reason=str(error))
                seconds = RETRY_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await stop.wait()
        await self._close()

    async def export_all(self) -> None:
        """Export all that the ledger has now, and close the segment.

        Raises `BrokerUnavailable`, `LedgerGap`, or OSError if a file cannot be written.
        """
        while await self._export_page():
            await self._close_if_due()
        await self._close()
        await self._remove_exported()

    async def _export_page(self) -> bool:
        """Read one page of the ledger into the open segment; False if there was nothing to read."""
        after = self._directory.open_last
        page = await self._broker.read_filtered(topology.LEDGER, ">", after, PAGE_MESSAGES)
        PENDING.set(page.remaining)
        if not page.messages:
            return False
        first = after + 1
        if page.messages[0].seq > first:
            first = await self._check_gap(after)
        if not self._directory.is_open:
            self._opened_at = time.monotonic()
        await asyncio.to_thread(self._add, page.messages, first)
        return True

    def _add(self, messages: list[StoredMessage], first: int) -> None:
        lines = [to_line(each.seq, each.subject, each.data) for each in messages]
        self._directory.add(lines, first, messages[-1].seq)
        EXPORTED.inc(len(messages))

    async def _check_gap(self, after: int) -> int:
        """Return the first sequence that the next segment covers; raises `LedgerGap`.

        That is 1 for a ledger that has lost nothing: so a directory's first segment is known to be
        the first of all. Messages may be missing within the ledger, where nobody has stored any;
        what matters is where it begins.
        """
        info = await declaration.stream_info(self._broker, topology.LEDGER)
        begins = info.state.first_seq
        if not after:
            return begins if begins > (info.config.first_seq or 1) else 1
        if begins > after + 1:
            if not self._accepts_gap:
                raise LedgerGap(after, begins)
            log.error("ledger_gap_accepted", exported=after, first=begins)
            self._accepts_gap = False
        return after + 1

    async def _close_if_due(self) -> None:
        age = time.monotonic() - self._opened_at
        is_large = self._directory.open_bytes >= self._plan.segment_bytes
        if self._directory.is_open and (is_large or age >= self._plan.segment_seconds):
            await self._close()

    async def _close(self) -> None:
        if segment := await asyncio.to_thread(self._directory.close_segment):
            self._closed.append((time.monotonic(), segment.last))
            log.info("segment_closed", first=segment.first, last=segment.last)

    async def _remove_exported(self) -> None:
        """Remove what closed segments hold, once it is old enough or the ledger is half full."""
        if self._plan.keep_seconds is None or not self._closed:
            return
        is_urgent = await self._is_half_full()
        oldest = time.monotonic() - self._plan.keep_seconds
        old = [last for closed, last in self._closed if is_urgent or closed <= oldest]
        if not old:
            return
        await self._rollups.roll_up()  # what is removed is in the sums of `millstream usage` still
        await self._broker.purge(topology.LEDGER, None, old[-1] + 1)
        for _ in old:
            self._closed.popleft()
        log.info("ledger_records_removed", last=old[-1])

    async def _is_half_full(self) -> bool:
        info = await declaration.stream_info(self._broker, topology.LEDGER)
        limit = info.config.max_bytes or 0
        return limit > 0 and info.state.bytes >= URGENT_RATIO * limit
