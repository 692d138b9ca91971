"""Token log of one request: claimed by one attempt at a time, appended by compare-and-set.

Every append names the sequence of the log's last record. A paused worker that wakes up after
another attempt has claimed the log therefore adds nothing: its append fails with `Fenced`.

Token logs are in the broker's memory. When a single server restarts they are gone; the worker that
still writes a log then stores all of its records again, and the log goes on where it was. The
worker that has finished a log can restore it in the same way (`FinishedLog`).
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from streams import messages, subjects, topology
from streams.broker.broker_client import Broker, PubAck, StoredMessage, StoreRefused
from streams.broker.responses import MessagePage
from streams.broker.retry import retry_for
from streams.errors import BrokerUnavailable, MillstreamError
from streams.headers import CLAIM, ENDED, EXPECTED_LAST, MESSAGE_ID, RESTART
from streams.messages import Encoding, LedgerRecord
from streams.records import usage_counters
from streams.records.log_contents import LogContents
from streams.records.token_log_cache import TokenLogCache
from streams.subjects import LogAddress

# Long enough for a request to survive a leader election of the broker (4 to 6 s) or a restart.
RETRY_TIMEOUT_SECONDS = 30.0
_PAUSE_SECONDS = 0.25
_NO_HEADERS: Mapping[str, str] = {}


class Fenced(MillstreamError):
    """This writer has lost the token log: another attempt has claimed it, or it has ended.

    The writer must append nothing more and must not acknowledge the request's work message.
    """


def decode_contents(stored: Sequence[StoredMessage]) -> LogContents:
    """Return the contents of a token log, given all of its stored messages in order."""
    records = [messages.unpack_record(message.data) for message in skip_void(stored)]
    return LogContents(records, stored[-1].seq if stored else 0)


def _begins_anew(stored: Sequence[StoredMessage]) -> bool:
    """Return whether one of a token log's messages is a claim that makes void all before it."""
    return any(RESTART in message.headers for message in stored)


def skip_void(stored: Sequence[StoredMessage]) -> Sequence[StoredMessage]:
    """Return messages of a token log from the last claim on that began anew; all if none did."""
    begin = next((n for n in reversed(range(len(stored))) if RESTART in stored[n].headers), 0)
    return stored[begin:]


async def read_log_begin(
    broker: Broker, stream: str, query: Mapping[str, int | str]
) -> MessagePage:
    """Return the first page of a log that counts: without what a later claim has made void.

    `query` reads the log from its first record on, as for `Broker.read_page`. If the log has lost
    its beginning and an attempt has begun anew since, the page begins with that attempt's claim.
    Raises `BrokerUnavailable`.
    """
    first = page = await broker.read_page(stream, query)
    is_truncated = decode_contents(first.messages).is_truncated
    while is_truncated and page.remaining and not _begins_anew(page.messages):
        page = await broker.read_page(stream, {**query, "seq": page.messages[-1].seq + 1})
    if not _begins_anew(page.messages):
        return first
    return MessagePage(list(skip_void(page.messages)), page.remaining)


class _LogLost(Exception):
    """The log is empty although this writer has appended to it: the broker lost its memory."""


IsSettled = Callable[[], Awaitable[bool]]


async def never_settled() -> bool:
    """Return False: the end of most requests is stored in their log alone."""
    return False


class TokenLog:
    """One writer's access to the token log of one request, mostly a worker's for one attempt.

    The writer calls `claim` (or `read`) first and then appends; its calls must not overlap. Each
    append succeeds only if no other writer has appended meanwhile. `shards` is the number of
    streams over which all token logs are spread. `is_settled` tells of a log that is empty whether
    it was removed behind the request's result, and not lost. `encoding` is that of the records.
    """

    def __init__(
        self,
        broker: Broker,
        address: LogAddress,
        shards: int,
        is_settled: IsSettled = never_settled,
        encoding: Encoding = "msgpack",
    ) -> None:
        self.address, self._encoding = address, encoding
        self._broker, self._shards, self._is_settled = broker, shards, is_settled
        self._stream = topology.token_stream_of(address.request_id, shards)
        self.subject = subjects.log(address, shards)
        self.last = 0
        self.cache = TokenLogCache()  # the log as this writer knows it

    async def read(self) -> LogContents:
        """Read and return everything stored so far; the next append then goes after it.

        Raises `BrokerUnavailable` if the broker does not answer.
        """
        stored = await self._broker.read_subject(self._stream, self.subject)
        self.cache = TokenLogCache()
        for message in skip_void(stored):
            self.cache.add(message.seq, message.data)
        found = decode_contents(stored)
        self.last = found.last
        return found

    async def claim(self, model: str, version: str, worker: str) -> LogContents:
        """Claim the log for a new attempt by `worker`; return what the log held before the claim.

        From then on the appends of earlier attempts fail with `Fenced`. If the log has its terminal
        already, nothing is claimed, and the result has `terminal`. If the log's beginning is lost
        (`is_truncated`), everything before the claim is void from then on: the claim says so, and
        the broker drops it in time. No record is deleted, since the right to purge a stream is the
        right to purge all of it: no worker has it. The first attempt needs no read:
        it expects an empty log. Lost races and missing answers are retried; raises
        `BrokerUnavailable` when the broker has not answered for `RETRY_TIMEOUT_SECONDS`.
        """
        before = LogContents()
        claim = {CLAIM: secrets.token_hex(4)}  # a worker's next claim may have the same bytes
        while before.terminal is None:
            started = messages.started_record(
                model, version, before.attempts + 1, worker, before.first_output_at
            )
            headers = claim | ({RESTART: "1"} if before.is_truncated else {})
            try:
                await self.append(started, headers)
            except Fenced:
                before = await retry_for(RETRY_TIMEOUT_SECONDS, self.read)
            else:
                if before.is_truncated:
                    self.cache.drop_before_claim()
                return before
        return before

    async def check_not_fenced(self) -> None:
        """Ask the broker whether any record follows this writer's last one.

        Raises `Fenced` if so: another attempt has claimed the log, or it has ended. Raises
        `BrokerUnavailable` if the broker does not answer.
        """
        query: dict[str, int | str] = {"next_by_subj": self.subject, "seq": self.last + 1}
        if await self._broker.read(self._stream, query):
            raise Fenced(f"the log {self.subject} has moved on")

    async def append(
        self, record: Mapping[str, Any], headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        """Append one record after this writer's last one; returns once the broker has stored it.

        Retries for `RETRY_TIMEOUT_SECONDS` while the broker does not answer, then raises
        `BrokerUnavailable`. Raises `Fenced` if another writer has appended since. `headers` are
        of the record beside ours: those of a claim, or of what is restored.
        """
        await self.append_packed([messages.pack_record(record, self._encoding)], headers)

    def to_finished(self) -> "FinishedLog":
        """Return a copy of the log for a later `restore`; call this when the log has just ended."""
        packed, ended_ms = messages.pack(self.cache.records), self._broker.clock.now_ms()
        return FinishedLog(self._broker, self.address, self._shards, packed, ended_ms)

    async def append_packed(
        self, unsaved: list[bytes], headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        """Append packed records one by one; retries and raises as `append`.

        If the broker has lost the log, all records that this writer knows are stored again first.
        Stored records are removed from the list `unsaved`, which the caller must not use
        afterwards.
        """
        deadline = time.monotonic() + RETRY_TIMEOUT_SECONDS
        while unsaved:
            try:
                await self._append_one(unsaved[0], headers, max(0.0, deadline - time.monotonic()))
                unsaved.pop(0)
            except _LogLost:
                unsaved = self.cache.records + unsaved
                self.cache, self.last = TokenLogCache(), 0
            except BrokerUnavailable:
                if time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _append_one(self, payload: bytes, headers: Mapping[str, str], seconds: float) -> None:
        all_headers = {EXPECTED_LAST: str(self.last), **headers}
        try:
            stored = await self._broker.store_retrying(self.subject, payload, all_headers, seconds)
            self.last = stored.seq
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                raise BrokerUnavailable(f"the broker refuses to append: {refusal}") from refusal
            self.last = await self._resolve_conflict(payload, headers)
        self.cache.add(self.last, payload, is_claim=CLAIM in headers)

    async def _resolve_conflict(self, payload: bytes, headers: Mapping[str, str]) -> int:
        """Return the sequence of our append if it is what caused the conflict.

        The conflict may come from this very append, whose confirmation got lost. Another attempt
        would have stored its claim first, so a single record with equal bytes behind `last` is
        ours. Raises `Fenced` if another writer has appended, `_LogLost` if the log is gone, and
        `BrokerUnavailable` if the conflicting record has not reached the replica that was read.
        """
        found = await self._broker.read_subject(self._stream, self.subject)
        behind = [message for message in found if message.seq > self.last]
        own = [m for m in behind if m.data == payload and headers.items() <= m.headers.items()]
        if len(behind) == 1 and own:
            return own[0].seq
        if self.cache.records and not found:
            if await self._is_settled():
                raise Fenced(f"the log {self.subject} was removed behind its result")
            raise _LogLost
        if not behind:
            raise BrokerUnavailable(f"the last record of {self.subject} cannot be read yet")
        raise Fenced(f"the log {self.subject} has moved on")


@dataclass(frozen=True, slots=True)
class FinishedLog:
    """A token log that has ended, kept to be stored again if the broker loses its own.

    Its records are packed into one piece: kept for minutes, thousands of small ones would keep
    Python's allocator from returning the memory around them.
    """

    broker: Broker
    address: LogAddress
    shards: int
    packed: bytes
    ended_ms: int

    async def restore(self) -> None:
        """Store again those records of the log that the broker has lost; a header says so.

        Does nothing if none is missing, or if the broker holds other records, since then another
        attempt writes the log. Raises `BrokerUnavailable` if the broker does not answer. Safe to
        repeat and to run concurrently.
        """
        log = TokenLog(self.broker, self.address, self.shards)
        await log.read()
        records, stored = messages.unpack(self.packed), log.cache.records
        if stored == records[: len(stored)]:
            with suppress(Fenced):
                await log.append_packed(records[len(stored) :], {ENDED: str(self.ended_ms)})


async def write_ledger_record(broker: Broker, record: LedgerRecord) -> PubAck:
    """Correct the usage counters to the request's real use, then store its ledger record.

    Calling this again for the same request changes nothing, since the request id deduplicates.
    Returns the broker's confirmation of the record. Each of the two steps retries for
    `RETRY_TIMEOUT_SECONDS` while the broker does not answer, then raises `BrokerUnavailable`.
    Raises `StoreRefused` if the broker refuses.
    """
    await usage_counters.settle(broker, record, RETRY_TIMEOUT_SECONDS)
    return await broker.store_retrying(
        subjects.ledger(record.tenant, record.model),
        record.pack(),
        {MESSAGE_ID: record.request_id},
        RETRY_TIMEOUT_SECONDS,
    )
