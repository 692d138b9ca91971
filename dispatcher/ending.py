"""Ending requests that no worker will end: a terminal in the token log, a ledger record."""

import asyncio
from typing import Any

import structlog

from dispatcher.lines import Queued
from dispatcher.metrics import observe_ended
from streams import messages
from streams.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import Envelope
from streams.messages import LedgerRecord
from streams.subjects import Log
from streams.token_log import Contents, Fenced, TokenLog, write_ledger

log = structlog.get_logger()

NOBODY = ""  # the worker and the version of a request that never ran
AT_ONCE = 16  # requests that are being ended side by side
_DISPATCHED = "dispatched"  # not an end: only its acknowledgement got lost
_RETRY_SECONDS = 0.25


class Endings:
    """Ends requests of one model for as long as `run` runs; then their place is freed."""

    def __init__(self, broker: Broker, model: str, shards: int) -> None:
        self._broker, self._model, self._shards = broker, model, shards
        self._waiting: asyncio.Queue[tuple[Queued, str, str]] = asyncio.Queue()
        self._under_way: dict[str, Queued] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._under_way

    @property
    def oldest(self) -> Queued | None:
        """Of those under way, the one that has been in REQUESTS for longest."""
        return min(self._under_way.values(), key=lambda item: item.seq, default=None)

    def put(self, item: Queued, outcome: str, message: str = "") -> None:
        """End a request that is not queued any more with `cancelled` or an error code."""
        self._under_way[item.request_id] = item
        self._waiting.put_nowait((item, outcome, message))

    def acknowledge(self, item: Queued) -> None:
        """Free the place of a request that was dispatched."""
        self.put(item, _DISPATCHED)

    async def run(self) -> None:
        """End until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(self._end_each(), name=f"end-{number}")

    async def _end_each(self) -> None:
        while True:
            item, outcome, message = await self._waiting.get()
            try:
                if outcome != _DISPATCHED:
                    await self._end(item, outcome, message)
                await self._broker.publish(item.reply, b"+ACK")
            except (BrokerUnavailable, StoreRefused) as error:
                log.warning("ending_waits", request_id=item.request_id, reason=str(error))
                self._waiting.put_nowait((item, outcome, message))
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._under_way.pop(item.request_id, None)

    async def _end(self, item: Queued, outcome: str, message: str) -> None:
        await end(self._broker, item.envelope, self._model, outcome, message, self._shards)
        log.info(
            "request_ended_in_queue",
            request_id=item.request_id,
            tenant=item.tenant,
            outcome=outcome,
            reason=message,
        )
        observe_ended(self._model, outcome)


async def end(
    broker: Broker, envelope: Envelope, model: str, outcome: str, message: str, shards: int
) -> bool:
    """End a request with `outcome` (`cancelled` or an error code); False if it had ended already.

    What earlier attempts have stored is billed. Idempotent; raises `BrokerUnavailable`.
    """
    address = Log(envelope.tenant, envelope.route, envelope.request_id)
    log, ended_here = TokenLog(broker, address, shards), False
    while True:
        before = await log.read()
        terminal = before.terminal
        if terminal is not None:
            break
        try:
            now_ms, generated = broker.clock.now_ms(), before.generated
            await log.append(_terminal(envelope, outcome, message, generated, now_ms))
            ended_here = True
        except Fenced:
            continue
    await write_ledger(broker, _record(envelope, model, before, terminal, broker.clock.now_ms()))
    return ended_here


def _record(
    envelope: Envelope, model: str, log: Contents, terminal: dict[str, Any], now_ms: int
) -> LedgerRecord:
    return LedgerRecord(
        request_id=envelope.request_id,
        tenant=envelope.tenant,
        model=model,
        version=_version(log.records),
        outcome=terminal.get("finish_reason") or terminal["code"],
        prompt_tokens=envelope.prompt_tokens,
        completion_tokens=terminal["usage"]["completion_tokens"],
        attempts=log.attempts,
        worker=NOBODY,
        accepted=envelope.accepted,
        finished=now_ms,
        adapter=envelope.adapter,
        account=envelope.account,
    )


def _terminal(
    envelope: Envelope, outcome: str, message: str, generated: int, now_ms: int
) -> dict[str, Any]:
    used = messages.usage(envelope.prompt_tokens, generated)
    if outcome == "cancelled":
        waited = max(0, now_ms - envelope.accepted)
        return messages.done("cancelled", used, {"queue": waited, "total": waited})
    return messages.failed(outcome, message, used)


def _version(records: list[dict[str, Any]]) -> str:
    claims = [record["version"] for record in records if record["type"] == "started"]
    return claims[-1] if claims else NOBODY
