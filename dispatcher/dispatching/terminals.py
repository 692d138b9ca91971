"""Ends requests that no worker will end: a terminal in the token log, a ledger record, the ack."""

import asyncio
from contextlib import suppress
from typing import Any

import structlog

from dispatcher.dispatching.metrics import observe_ended
from dispatcher.queueing.tenant_queues import QueuedRequest
from streams import messages
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import Envelope
from streams.ledger_records import build_ledger_record
from streams.messages import LedgerRecord
from streams.records import attempt_history
from streams.records.attempt_history import AttemptHistory
from streams.records.log_contents import RequestEnd
from streams.records.stored_ends import stored_end_of
from streams.records.token_log import Fenced, TokenLog, write_ledger_record
from streams.subjects import LogAddress

log = structlog.get_logger()

NO_WORKER = ""  # in the ledger record of a request that a dispatcher has ended
CONCURRENT_WRITES = 16
_ACKNOWLEDGE_ONLY = "dispatched"  # no terminal is written: only the acknowledgement was lost
_RETRY_SECONDS = 0.25


class TerminalWriter:
    """Ends a model's requests that no worker will run, while `run` runs.

    A request is ended by the last record in its token log (the terminal) and a ledger record, then
    acknowledged in the stream REQUESTS. What the broker refuses, or does not answer, is repeated
    every `_RETRY_SECONDS` (0.25 s). `len()` counts the requests that are not done yet; `in` finds
    them by id.
    """

    def __init__(self, broker: Broker, model: str, shards: int) -> None:
        self._broker, self._model, self._shards = broker, model, shards
        self._to_write: asyncio.Queue[tuple[QueuedRequest, str, str]] = asyncio.Queue()
        self._in_progress: dict[str, QueuedRequest] = {}

    def __len__(self) -> int:
        return len(self._in_progress)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._in_progress

    @property
    def oldest(self) -> QueuedRequest | None:
        """The request not done yet with the lowest sequence in REQUESTS; None if there is none."""
        return min(self._in_progress.values(), key=lambda item: item.seq, default=None)

    def end_request(self, item: QueuedRequest, outcome: str, message: str = "") -> None:
        """Have a request ended as `cancelled` or with an error code; returns at once.

        The caller has removed it from the fair queue. `message` is the text of the error for the
        client; `cancelled` has none.
        """
        self._in_progress[item.request_id] = item
        self._to_write.put_nowait((item, outcome, message))

    def acknowledge(self, item: QueuedRequest) -> None:
        """Have a request acknowledged in REQUESTS that was dispatched already; returns at once.

        Nothing is written to its token log.
        """
        self.end_request(item, _ACKNOWLEDGE_ONLY)

    async def run(self) -> None:
        """End requests as they are given, until cancelled; `CONCURRENT_WRITES` (16) at a time.

        After a cancellation, the requests that are not acknowledged are delivered to the next
        leader.
        """
        async with asyncio.TaskGroup() as tasks:
            for number in range(CONCURRENT_WRITES):
                tasks.create_task(self._write_each(), name=f"end-{number}")

    async def _write_each(self) -> None:
        while True:
            item, outcome, message = await self._to_write.get()
            try:
                if outcome != _ACKNOWLEDGE_ONLY:
                    await self._write(item, outcome, message)
                await self._broker.publish(item.reply, b"+ACK")
            except (BrokerUnavailable, StoreRefused) as error:
                log.warning("terminal_retried", request_id=item.request_id, reason=str(error))
                self._to_write.put_nowait((item, outcome, message))
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._in_progress.pop(item.request_id, None)

    async def _write(self, item: QueuedRequest, outcome: str, message: str) -> None:
        await write_terminal(
            self._broker, item.envelope, self._model, outcome, message, self._shards
        )
        log.info(
            "request_ended_in_queue",
            request_id=item.request_id,
            tenant=item.tenant,
            outcome=outcome,
            reason=message,
        )
        observe_ended(self._model, outcome)


async def write_terminal(
    broker: Broker, envelope: Envelope, model: str, outcome: str, message: str, shards: int
) -> bool:
    """End a request with `outcome`: `cancelled` or an error code. Idempotent.

    Writes the last record of its token log, unless it has one, and its ledger record; tokens that
    earlier attempts have stored are billed. Returns True if this call has ended the request, False
    if it had ended already. Raises `BrokerUnavailable` if the broker does not answer,
    `StoreRefused` if it refuses.
    """
    address = LogAddress(envelope.tenant, envelope.route, envelope.request_id)
    log, ended_here = TokenLog(broker, address, shards, encoding=envelope.encoding), False
    stored_end = stored_end_of(broker, envelope)
    end: RequestEnd | None = None
    while end is None:
        contents = await log.read()
        stored = await stored_end.read_end() if stored_end and not contents.end else None
        is_removed = envelope.item and not contents.records  # perhaps, behind the result
        end = contents.end or (stored if is_removed else None)
        if end is None:
            now_ms, generated = broker.clock.now_ms(), contents.generated_tokens
            own = _terminal_record(envelope, outcome, message, generated, now_ms)
            terminal = stored.terminal if stored else own
            if stored_end:
                terminal = await stored_end.store_result(log.cache.records, terminal)
            with suppress(Fenced):
                await log.append(terminal)
                by_log = contents.ended_by(terminal)  # which may have lost what the other tells
                end = max(by_log, stored or by_log, key=lambda each: each.attempts)
                ended_here = True
    history = await attempt_history.read_history(broker, address, contents)
    record = _ledger_record(envelope, model, end, history, broker.clock.now_ms())
    await write_ledger_record(broker, record)
    return ended_here


def _ledger_record(
    envelope: Envelope,
    model: str,
    end: RequestEnd,
    history: AttemptHistory,
    now_ms: int,
) -> LedgerRecord:
    return build_ledger_record(
        envelope,
        model,
        end.terminal,
        now_ms,
        version=end.version,
        worker=NO_WORKER,
        attempts=end.attempts,
        first=end.first_output_at,
        earlier_attempts=history.summarize(),
    )


def _terminal_record(
    envelope: Envelope, outcome: str, message: str, generated: int, now_ms: int
) -> dict[str, Any]:
    used = messages.openai_usage(envelope.prompt_tokens, generated)
    if outcome == "cancelled":
        waited = max(0, now_ms - envelope.accepted)
        return messages.done_record("cancelled", used, {"queue": waited, "total": waited})
    return messages.error_record(outcome, message, used)
