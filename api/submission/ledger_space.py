"""Room in the ledger: no request is accepted whose record might find none.

The last tenth of the ledger is for requests that are accepted already, and so is as much as their
records take; so the record of an accepted request always finds room, and its end is acknowledged.
"""

import asyncio
from dataclasses import dataclass

import structlog
from nats.js.errors import NotFoundError
from prometheus_client import Gauge

from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable, LedgerFull

log = structlog.get_logger()
LEDGER_USED = Gauge(
    "millstream_ledger_used_ratio", "Part of the ledger's size that is in use, 0 to 1."
)

CHECK_SECONDS = 1.0
ALARM_RATIO, FULL_RATIO = 0.7, 0.9
RECORD_BYTES = 1024  # ample for one record with its subject and headers
RETRY_SECONDS = 10.0


@dataclass(frozen=True)
class LedgerUse:
    """Bytes in the ledger and its limit (0: none), and how many accepted requests have no record.

    What holds at one time; it is up to `CHECK_SECONDS` old.
    """

    stored_bytes: int = 0
    max_bytes: int = 0
    accepted_requests: int = 0

    @property
    def used_ratio(self) -> float:
        """The part of the ledger that is in use, 0 to 1; 0 if it has no limit."""
        return self.stored_bytes / self.max_bytes if self.max_bytes else 0.0

    @property
    def is_filling(self) -> bool:
        """True from 70 % on: somebody should look whether records are exported and removed."""
        return self.used_ratio >= ALARM_RATIO

    @property
    def is_full(self) -> bool:
        """True if no further request may be accepted."""
        if not self.max_bytes:
            return False
        promised = self.accepted_requests * RECORD_BYTES
        has_room = self.stored_bytes + promised <= self.max_bytes
        return self.used_ratio >= FULL_RATIO or not has_room


class LedgerSpace:
    """Knows how full the ledger is, while `run` runs, and refuses requests when it is."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self.use = broker, LedgerUse()

    def check(self) -> None:
        """Raise `LedgerFull` if the ledger has no room for further requests."""
        use = self.use
        if use.is_full:
            raise LedgerFull(
                f"the ledger of {use.max_bytes} bytes is full to {use.used_ratio:.0%}, and what is "
                "left is for requests accepted before; an operator must export or enlarge it",
                RETRY_SECONDS,
            )

    async def run(self) -> None:
        """Look every second, until cancelled; what is not known stays as it was."""
        while True:
            try:
                self._update(await self._read())
            except (BrokerUnavailable, NotFoundError) as error:
                log.debug("ledger_not_checked", reason=str(error))
            await asyncio.sleep(CHECK_SECONDS)

    async def _read(self) -> LedgerUse:
        ledger = await declaration.stream_info(self._broker, topology.LEDGER)
        accepted = 0
        for stream in (topology.REQUESTS, topology.WORK):
            accepted += (await declaration.stream_info(self._broker, stream)).state.messages
        limit = max(0, ledger.config.max_bytes or 0)
        return LedgerUse(ledger.state.bytes, limit, accepted)

    def _update(self, use: LedgerUse) -> None:
        before, self.use = self.use, use
        LEDGER_USED.set(use.used_ratio)
        facts = {"used_ratio": round(use.used_ratio, 3), "max_bytes": use.max_bytes}
        if use.is_full and not before.is_full:
            log.error("ledger_full", **facts)
        elif use.is_filling and not before.is_filling:
            log.warning("ledger_filling", **facts)
        elif before.is_full and not use.is_full:
            log.info("ledger_has_room", **facts)
