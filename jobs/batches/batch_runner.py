"""Runs one batch: checks its input, feeds its lines, counts their results, and finishes it."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import structlog
from nats.aio.msg import Msg

from api.batch_bodies import batch_id
from api.batches.batch_line import InputLine, parse_line
from api.batches.input_lines import iterate_lines
from jobs.batches.index_file import write_index
from jobs.batches.input_check import check_input, common_model
from jobs.batches.item_feeder import ROUTE, BatchRefused, ItemFeeder
from jobs.batches.line_states import LineState, LineStates
from jobs.batches.output_files import OutputFiles, write_files
from jobs.batches.page_counts import PageCounts
from registry.store import Registry
from registry.tenant_records import Tenant
from streams import job_subjects, subjects, topology
from streams.broker.broker_client import Broker, StoredMessage, StoreRefused
from streams.errors import MillstreamError, Refused
from streams.headers import ItemRef
from streams.messages import openai_usage
from streams.records.files.file_records import FileState, StoredFile
from streams.records.files.file_store import FileStore
from streams.records.jobs.batch_records import Batch, BatchStatus
from streams.records.jobs.batch_store import BatchStore
from streams.records.jobs.item_results import CANCELLED, ItemResult, make_request_id
from streams.records.jobs.result_store import read_result, store_result, unpack_result
from streams.records.webhooks.event_outbox import store_event
from streams.records.webhooks.events import EventType, WebhookEvent
from streams.subjects import LogAddress

log = structlog.get_logger()

MAX_SPAN = 1024  # lines from the first without a result to the last that was read
MAX_OPEN_BYTES = 16 * 2**20  # of the lines that are in memory
PUBLISHED_AT_ONCE = 32
TICK_SECONDS = 0.25
SYNC_SECONDS = 1.0
# So long after its result a line's log is removed: by then its ledger record is written
PURGE_SECONDS = 5.0
PURGED_AT_ONCE = 32
RETRY_SECONDS = 1.0


class BatchGone(MillstreamError):
    """The batch's record was removed while it was run."""


@dataclass(frozen=True)
class RunnerParts:
    """Parts that the runners of all batches of one process share."""

    broker: Broker
    registry: Registry
    batches: BatchStore
    files: FileStore
    feeder: ItemFeeder
    shards: int
    max_lines: int
    window: int  # requests of one batch that are under way at once


class BatchRunner:
    """One batch in the hands of the process that holds its lease.

    Whatever it does may be repeated by the next process: requests have the same ids, results are
    stored once, and the record is changed by compare-and-set.
    """

    def __init__(self, parts: RunnerParts, batch: Batch) -> None:
        self._parts, self._broker = parts, parts.broker
        self.batch = batch
        self._wake = asyncio.Event()
        self._lines = LineStates(batch.watermark, batch.offset, batch.tries)
        self._source: AsyncIterator[InputLine] | None = None
        self._is_read = False  # to the end of its input
        self._may_have_lost = False  # requests that were published
        self._logs: deque[tuple[float, str]] = deque()  # to be removed, and when
        self._synced_at = -math.inf  # monotonic seconds
        self._logger = log.bind(tenant=batch.tenant, batch=batch.id)

    def wake(self) -> None:
        """Look now whether a client has changed the batch; returns at once."""
        self._synced_at = -math.inf
        self._wake.set()

    def repeat_requests(self) -> None:
        """Publish soon what is under way again: its queue is another one. Returns at once.

        A request that is queued or running elsewhere is recognised by its id.
        """
        self._may_have_lost = True
        self._wake.set()

    async def run(self) -> None:
        """Bring the batch to its end; cancelling leaves the rest to another process.

        Raises `BrokerUnavailable` and other errors of the broker: the batch is then taken up again
        later.
        """
        heard = job_subjects.resulted(self.batch.tenant, self.batch.id)
        subscription = await self._broker.subscribe(heard, self._on_result)
        try:
            if not self.batch.status.is_final:
                await self._run_to_end()
        finally:
            await subscription.unsubscribe()
        await self._store_event()

    async def _run_to_end(self) -> None:
        source = await self._find_input()
        if source is None:
            return
        if self.batch.status is BatchStatus.VALIDATING:
            await self._validate(source)
        if self.batch.status in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING):
            await self._work(source)
        if not self.batch.status.is_final:
            await self._finish(source)
        await self._remove_logs(math.inf)

    async def _store_event(self) -> None:
        """Tell webhooks of the end; whoever died since takes the batch up again until that is so.

        The record says that the event is due, from the same write on that ended the batch.
        """
        if not self.batch.event_due:
            return
        kind = EventType(f"batch.{self.batch.status.value}")
        await store_event(self._broker, WebhookEvent(self.batch.tenant, kind, batch_id(self.batch)))
        await self._save(lambda it: replace(it, event_due=False))

    async def _on_result(self, msg: Msg) -> None:
        self._wake.set()

    async def _find_input(self) -> StoredFile | None:
        """Return the input file; without one the batch has failed."""
        found = await self._parts.files.find(self.batch.tenant, self.batch.input_file)
        if found and found.state is FileState.READY:
            return found
        await self._fail("input_file_missing", "the input file was deleted, or its time is over")
        return None

    async def _fail(self, code: str, message: str) -> None:
        now = self._now()
        await self._save(lambda it: it.as_refused(code, message, now))
        self._logger.info("batch_failed", code=code)

    async def _validate(self, source: StoredFile) -> None:
        report = await check_input(
            self._parts.files, source, self.batch.endpoint, self._parts.max_lines
        )
        index = ""
        if not report.errors:
            index = await write_index(self._broker, self.batch, report.places)
        now = self._now()

        def apply(batch: Batch) -> Batch:
            model = common_model(report.models)
            known = replace(batch, total=report.total, model=model, index_file=index)
            if report.errors:
                return replace(known.at_status(BatchStatus.FAILED, now), errors=report.errors)
            if batch.status is not BatchStatus.VALIDATING:  # it was cancelled meanwhile
                return known
            return known.at_status(BatchStatus.IN_PROGRESS, now)

        await self._save(apply)
        self._logger.info("batch_validated", lines=report.total, errors=len(report.errors))

    def _now(self) -> int:
        return int(self._broker.clock.now())

    async def _save(self, apply: Callable[[Batch], Batch]) -> None:
        saved = await self._parts.batches.save(self.batch, apply)
        if saved is None:
            raise BatchGone("the batch's record was removed")
        self.batch, self._synced_at = saved, time.monotonic()

    # From the first line to the last result

    async def _work(self, source: StoredFile) -> None:
        """Feed lines until all have ended, or none may go on."""
        await self._recover()
        start = self._lines.watermark, self._lines.offset
        self._source = iterate_lines(self._parts.files, source, *start)
        while True:
            self._wake.clear()
            await self._count_results()
            if time.monotonic() - self._synced_at >= SYNC_SECONDS:
                await self._synchronise()
            if self._is_over():
                break
            await self._feed()
            await self._remove_logs(time.monotonic())
            await self._sleep()
        if not self._is_read or self._lines:
            await self._close_open_lines()
            await self._count_results()
        await self._save(self._with_progress)

    async def _close_open_lines(self) -> None:
        """Store that lines which may still be under way somewhere were cancelled.

        Else one of them might end after the files were written, and contradict them.
        """
        first = self._lines.watermark
        span = range(first, min(first + MAX_SPAN, self.batch.total))
        left = [index for index in span if not self._lines.has_ended(index)]
        for start in range(0, len(left), PUBLISHED_AT_ONCE):
            group = left[start : start + PUBLISHED_AT_ONCE]
            await asyncio.gather(*map(self._close_line, group))

    async def _close_line(self, index: int) -> None:
        state = self._lines.get(index)
        attempt = state.attempt if state else 1
        request_id = make_request_id(self.batch.secret, index, attempt)
        now, usage = self._broker.clock.now_ms(), openai_usage(0, 0)
        result = ItemResult(request_id, attempt, now, code=CANCELLED, usage=usage)
        ref = ItemRef(self.batch.id, index, attempt, is_last=True)
        await store_result(self._broker, self.batch.tenant, ref, result)

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(TICK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _recover(self) -> None:
        """Learn which lines behind the watermark an earlier process has seen end."""
        if not self.batch.counted:
            return
        tenant, job, first = self.batch.tenant, self.batch.id, self._lines.watermark
        for start in range(first, first + MAX_SPAN, PUBLISHED_AT_ONCE):
            span = range(start, start + PUBLISHED_AT_ONCE)
            found = await asyncio.gather(
                *(read_result(self._broker, tenant, job, index) for index in span)
            )
            for index, result in zip(span, found, strict=True):
                if result:
                    self._lines.mark_ended(index)

    def _is_over(self) -> bool:
        """True if nothing more is to be waited for: all lines have ended, or none may go on."""
        if self.batch.is_stopped or self._is_expired():
            return not any(self._lines.iterate_under_way())
        return self._is_read and not self._lines

    def _is_expired(self) -> bool:
        return self.batch.expires_at <= self._broker.clock.now()

    async def _synchronise(self) -> None:
        """Store what was counted, and take over what a client has changed.

        If nothing may go on, what is under way is cancelled.
        """
        self._synced_at = time.monotonic()
        newest = await self._parts.batches.find(self.batch.tenant, self.batch.id)
        if newest is None:
            raise BatchGone("the batch's record was removed")
        self.batch = self._with_progress(newest)
        if self.batch != newest:
            await self._save(self._with_progress)
        if self.batch.is_stopped or self._is_expired():
            await self._cancel_all()

    async def _cancel_all(self) -> None:
        for state in self._lines.iterate_under_way():
            request_id = make_request_id(self.batch.secret, state.source.index, state.attempt)
            await self._broker.store(subjects.cancel(self.batch.tenant, request_id), b"")

    def _with_progress(self, batch: Batch) -> Batch:
        """Return a newer record with what this process has counted."""
        return replace(
            batch,
            completed=self.batch.completed,
            failed=self.batch.failed,
            usage=self.batch.usage,
            stored_bytes=self.batch.stored_bytes,
            counted=self.batch.counted,
            watermark=self._lines.watermark,
            offset=self._lines.offset,
            tries=self._lines.tries,
        )

    # Results

    async def _count_results(self) -> None:
        """Read what RESULTS has got since the last one that was counted."""
        pattern = job_subjects.results_of(self.batch.tenant, self.batch.id)
        while True:
            page = await self._broker.read_filtered(topology.RESULTS, pattern, self.batch.counted)
            counts = PageCounts()
            for message in page.messages:
                await self._count(message, counts)
            if page.messages:
                self.batch = counts.add_to(self.batch, page.messages[-1].seq)
            if not page.remaining or not page.messages:
                return

    async def _count(self, message: StoredMessage, counts: PageCounts) -> None:
        counts.stored_bytes += len(message.data) + len(message.subject)
        kind = job_subjects.result_kind(message.subject)
        if kind == "part":
            return
        index = self._parse_index(message.subject)
        if index is None:
            self._logger.error("result_unreadable", subject=message.subject)
            return
        result = await unpack_result(self._broker, message)
        if kind == "try":
            had_begun = not result.never_ran
            if self._lines.mark_failed(
                index, result.attempt, time.monotonic(), had_begun=had_begun
            ):
                self._logger.info(
                    "line_failed", index=index, attempt=result.attempt, code=result.code
                )
        else:
            self._lines.mark_ended(index)
            counts.add(result)
        self._forget_log(index, result.attempt)

    def _parse_index(self, subject: str) -> int | None:
        """Return the line of a result; None for a subject that names no line of the batch."""
        try:
            _, _, index = job_subjects.parse_result(subject)
        except ValueError:
            return None
        return index if index < self.batch.total else None

    def _forget_log(self, index: int, attempt: int) -> None:
        """Have the log of a try removed; which one that is, its result may be wrong about."""
        request_id = make_request_id(self.batch.secret, index, attempt)
        address = LogAddress(self.batch.tenant, ROUTE, request_id)
        self._logs.append(
            (time.monotonic() + PURGE_SECONDS, subjects.log(address, self._parts.shards))
        )

    async def _remove_logs(self, now: float) -> None:
        """Remove the token logs of lines that have had their result for a while."""
        stream = topology.token_stream_name(subjects.ITEM_SHARD)
        while self._logs and self._logs[0][0] <= now:
            due: list[str] = []
            while self._logs and self._logs[0][0] <= now and len(due) < PURGED_AT_ONCE:
                due.append(self._logs.popleft()[1])
            await asyncio.gather(*(self._broker.purge(stream, each, 0) for each in due))

    # Lines

    async def _feed(self) -> None:
        """Publish the lines that are due, as many as may be under way."""
        self._retry_lines(time.monotonic())
        if self.batch.is_stopped or self._is_expired():
            return
        if not self.batch.may_run(self._broker.clock.now()):
            return
        try:
            tenant = self._parts.feeder.find_tenant(self.batch.tenant, self.batch.key)
        except BatchRefused as error:
            await self._stop(error)
            return
        await self._read_lines()
        under_way = sum(1 for _ in self._lines.iterate_under_way())
        room = max(0, min(self._parts.window, tenant.max_queued) - under_way)
        due = list(islice(self._lines.iterate_due(time.monotonic()), room))
        if any(state.attempt > 1 for state in due):
            await self._save(self._with_progress)  # before they are published
        for start in range(0, len(due), PUBLISHED_AT_ONCE):
            group = due[start : start + PUBLISHED_AT_ONCE]
            await asyncio.gather(*(self._publish(state, tenant) for state in group))

    def _retry_lines(self, now: float) -> None:
        """Have lines published again whose requests are lost, or may be."""
        self._lines.retry_overdue(now)
        if self._may_have_lost:
            self._may_have_lost = False
            self._logger.warning("lines_repeated", count=self._lines.retry_all(now))

    async def _stop(self, error: BatchRefused) -> None:
        """Let no further line run; what has ended is kept."""
        errors = [_to_error(error.code, error.message)]
        await self._save(lambda it: replace(self._with_progress(it), errors=errors))
        await self._cancel_all()

    async def _read_lines(self) -> None:
        """Read lines until as many are in memory as may be under way."""
        assert self._source
        while (
            not self._is_read
            and len(self._lines) < self._parts.window
            and self._lines.span < MAX_SPAN
            and self._lines.bytes < MAX_OPEN_BYTES
        ):
            source = await anext(self._source, None)
            if source is None:
                self._is_read = True
                return
            assert source.data, "checked before the batch began"
            self._lines.add(source, parse_line(source.data, self.batch.endpoint))

    async def _publish(self, state: LineState, tenant: Tenant) -> None:
        index = state.source.index
        try:
            seconds = await self._parts.feeder.publish_line(self.batch, state, tenant)
        except (Refused, StoreRefused) as error:
            pause = (
                error.retry_after_seconds if isinstance(error, Refused) else 0
            ) or RETRY_SECONDS
            self._lines.delay(index, time.monotonic() + pause)
        except MillstreamError as error:  # such as a tokeniser that cannot be read
            self._logger.warning("line_not_published", index=index, reason=str(error))
            self._lines.delay(index, time.monotonic() + RETRY_SECONDS)
        else:
            self._lines.mark_published(index, time.monotonic() + seconds)

    # The end

    async def _finish(self, source: StoredFile) -> None:
        if self.batch.status is BatchStatus.IN_PROGRESS:
            now = self._now()
            await self._save(lambda it: it.at_status(BatchStatus.FINALIZING, now))
        files = await write_files(self._broker, self._parts.registry, self.batch, source)
        await self._save(lambda it: self._as_ended(it, files))
        self._logger.info(
            "batch_ended",
            status=self.batch.status.value,
            completed=self.batch.completed,
            failed=self.batch.failed,
        )

    def _as_ended(self, batch: Batch, files: OutputFiles) -> Batch:
        """Return the final record; its counts are those of the files' lines."""
        expired = files.unrun and batch.ran_late
        status = BatchStatus.EXPIRED if expired else BatchStatus.COMPLETED
        if batch.status is BatchStatus.CANCELLING:
            status = BatchStatus.CANCELLED
        elif batch.errors:
            status = BatchStatus.FAILED
        output, error, _ = files
        return replace(
            self._with_progress(batch).at_status(status, self._now()),
            completed=output.lines,
            failed=error.lines,
            output_file=output.id,
            error_file=error.id,
            tries={},
        )


def _to_error(code: str, message: str) -> dict[str, Any]:
    """An error of the whole batch, as its object shows it."""
    return {"code": code, "message": message, "line": None, "param": None}
