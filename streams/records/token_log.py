"""The token log of one request: claimed by one attempt at a time, appended by compare-and-set.

Every append names the sequence of the log's last record. A paused worker that wakes up after
another attempt has claimed the log therefore adds nothing: its append fails with `Fenced`.

Logs are kept in the broker's memory. When it restarts alone they are gone; whoever still writes one
then puts back all of its records, and the log goes on where it was. Whoever has ended one can do so
too.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streams import messages, subjects, topology
from streams.broker.connection import Broker, PubAck, StoredMessage, StoreRefused
from streams.broker.retry import retry_for
from streams.errors import BrokerUnavailable, MillstreamError
from streams.headers import CLAIM, EXPECTED_LAST, MESSAGE_ID
from streams.messages import LedgerRecord
from streams.records import usage_counters
from streams.records.token_log_cache import TokenLogCache
from streams.subjects import LogAddress

# A request outlives a broker's leader election (DESIGN §8.8: 4 to 6 s) and a restart.
RETRY_TIMEOUT_SECONDS = 30.0
_PAUSE_SECONDS = 0.25
_NO_CLAIM: Mapping[str, str] = {}


class Fenced(MillstreamError):
    """Another attempt owns the log now, or it has ended: append and acknowledge nothing."""


@dataclass(frozen=True)
class LogContents:
    """What a log holds: `records` in order and the sequence of the last one (0: empty)."""

    records: list[dict[str, Any]] = field(default_factory=list)
    last: int = 0

    @property
    def attempts(self) -> int:
        return max((r["attempt"] for r in self.records if r["type"] == "started"), default=0)

    @property
    def terminal(self) -> dict[str, Any] | None:
        last = self.records[-1] if self.records else None
        return last if last and last["type"] in messages.TERMINAL_TYPES else None

    @property
    def tokens(self) -> list[int]:
        """The tokens that all attempts together have stored."""
        return [token for part in self._output for token in part.get("tokens", ())]

    @property
    def text(self) -> str:
        """The text of these tokens that was released with them."""
        return "".join(part.get("text", "") for part in self._output)

    @property
    def rows(self) -> int:
        """How many vectors have been stored."""
        return sum(part["count"] for part in self._output if part["type"] == "result")

    @property
    def generated_tokens(self) -> int:
        """How many tokens there have been, of which the broker may have dropped the first."""
        last = next((part for part in reversed(self._output) if part["type"] == "chunk"), None)
        return last["index"] + last["count"] if last else 0

    @property
    def is_truncated(self) -> bool:
        """Whether the broker has dropped the beginning: no attempt can go on behind that."""
        ends = [0, *(part["index"] + part["count"] for part in self._output)]
        parts = zip(self._output, ends, strict=False)
        return any(part["index"] != end for part, end in parts)

    @property
    def _output(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["type"] in ("chunk", "result")]


def decode_contents(stored: list[StoredMessage]) -> LogContents:
    records = [messages.unpack(message.data) for message in stored]
    return LogContents(records, stored[-1].seq if stored else 0)


class _LogLost(Exception):
    """The log is empty, though we have written to it: the broker lost its memory."""


class TokenLog:
    """One writer's hold on one request's log. Not for concurrent appends: one is in flight."""

    def __init__(self, broker: Broker, address: LogAddress, shards: int) -> None:
        self.address = address
        self._broker, self._shards = broker, shards
        self._stream = topology.token_stream_of(address.request_id, shards)
        self.subject = subjects.log(address, shards)
        self.last = 0
        self.cache = TokenLogCache()  # the log as this writer knows it

    async def read(self) -> LogContents:
        """Everything stored so far; the next append goes behind it."""
        stored = await self._broker.read_subject(self._stream, self.subject)
        self.cache = TokenLogCache()
        for message in stored:
            self.cache.add(message.seq, message.data)
        found = decode_contents(stored)
        self.last = found.last
        return found

    async def claim(self, model: str, version: str, worker: str) -> LogContents:
        """Take the log for a new attempt and return what it held before.

        The claim itself is not in the result. Returns without claiming when the log has its
        terminal. The first attempt needs no read: it expects an empty log. Of a log without its
        beginning only the claim stays. Rides out a broker that does not answer, and raises, as
        `append` does.
        """
        before = LogContents()
        claim = {CLAIM: secrets.token_hex(4)}  # a worker's next claim may have the same bytes
        while before.terminal is None:
            attempt = before.attempts + 1
            try:
                await self.append(messages.started_record(model, version, attempt, worker), claim)
            except Fenced:
                before = await retry_for(RETRY_TIMEOUT_SECONDS, self.read)
            else:
                if before.is_truncated:
                    await self._drop_before_claim()
                return before
        return before

    async def check_not_fenced(self) -> None:
        """Raises `Fenced` when another attempt has claimed it; `BrokerUnavailable` as well."""
        query: dict[str, int | str] = {"next_by_subj": self.subject, "seq": self.last + 1}
        if await self._broker.read(self._stream, query):
            raise Fenced(f"the log {self.subject} has moved on")

    async def _drop_before_claim(self) -> None:
        self.cache.drop_before_claim()
        purge = partial(self._broker.purge, self._stream, self.subject, self.last)
        await retry_for(RETRY_TIMEOUT_SECONDS, purge)

    async def append(self, record: Mapping[str, Any], claim: Mapping[str, str] = _NO_CLAIM) -> None:
        """Store one record behind the last one.

        Rides out a broker that does not answer for `PATIENCE_SECONDS`, then raises
        `BrokerUnavailable`. Raises `Fenced` when another writer was faster.
        """
        await self.append_packed([messages.pack(record)], claim)

    def to_finished(self) -> "FinishedLog":
        """What this writer knows of the log, which has its terminal."""
        return FinishedLog(
            self._broker, self.address, self._shards, messages.pack(self.cache.records)
        )

    async def append_packed(
        self, unsaved: list[bytes], claim: Mapping[str, str] = _NO_CLAIM
    ) -> None:
        """`append` of packed records, one by one."""
        deadline = time.monotonic() + RETRY_TIMEOUT_SECONDS
        while unsaved:
            try:
                await self._append_one(unsaved[0], claim, max(0.0, deadline - time.monotonic()))
                unsaved.pop(0)
            except _LogLost:
                unsaved = self.cache.records + unsaved
                self.cache, self.last = TokenLogCache(), 0
            except BrokerUnavailable:
                if time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _append_one(self, payload: bytes, claim: Mapping[str, str], seconds: float) -> None:
        headers = {EXPECTED_LAST: str(self.last), **claim}
        try:
            stored = await self._broker.store_retrying(self.subject, payload, headers, seconds)
            self.last = stored.seq
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                raise BrokerUnavailable(f"the token log refuses: {refusal}") from refusal
            self.last = await self._resolve_conflict(payload, claim)
        self.cache.add(self.last, payload, is_claim=bool(claim))

    async def _resolve_conflict(self, payload: bytes, claim: Mapping[str, str]) -> int:
        """After a lost race: the winner may be this very append, whose confirmation got lost.

        Another attempt would have put its claim first, so equal bytes right behind `last` are ours.
        What cannot be read yet is still on its way to this replica: then it is to be asked again.
        """
        found = await self._broker.read_subject(self._stream, self.subject)
        behind = [message for message in found if message.seq > self.last]
        own = [m for m in behind if m.data == payload and claim.items() <= m.headers.items()]
        if len(behind) == 1 and own:
            return own[0].seq
        if self.cache.records and not found:
            raise _LogLost
        if not behind:
            raise BrokerUnavailable(f"what is behind the log {self.subject} cannot be read yet")
        raise Fenced(f"the log {self.subject} has moved on")

    async def finish(self, terminal: Mapping[str, Any], record: LedgerRecord) -> None:
        """Store the terminal, then the ledger record; raises as `append` does."""
        await self.append(terminal)
        await write_ledger_record(self._broker, record)


@dataclass(frozen=True, slots=True)
class FinishedLog:
    """A log that nothing is appended to, for whoever misses it later.

    Its records are one piece: kept for minutes, thousands of small ones keep Python's allocator
    from returning the memory around them.
    """

    broker: Broker
    address: LogAddress
    shards: int
    packed: bytes

    async def restore(self) -> None:
        """Store anew what the broker has lost of it, unless somebody writes it again by now.

        Raises `BrokerUnavailable`. Safe to repeat, and side by side.
        """
        log = TokenLog(self.broker, self.address, self.shards)
        await log.read()
        records, there = messages.unpack(self.packed), log.cache.records
        if there == records[: len(there)]:
            with suppress(Fenced):
                await log.append_packed(records[len(there) :])


async def write_ledger_record(broker: Broker, record: LedgerRecord) -> PubAck:
    """Settle a request's account and record its usage, each once: its id deduplicates."""
    await usage_counters.settle(broker, record, RETRY_TIMEOUT_SECONDS)
    return await broker.store_retrying(
        subjects.ledger(record.tenant, record.model),
        messages.pack(record),
        {MESSAGE_ID: record.request_id},
        RETRY_TIMEOUT_SECONDS,
    )
