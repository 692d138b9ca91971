"""Gives back what was reserved on counters of a day or month for requests that were never queued.

A process that dies between reserving and queueing leaves that behind. Any number of gateways may
look for it at the same time: each addition counts once.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

import structlog
from nats.js.api import StreamState
from nats.js.errors import NotFoundError

from streams import subjects, topology
from streams.broker.broker_client import Broker, StoredMessage, StoreRefused
from streams.broker.declaration import stream_info
from streams.errors import BrokerUnavailable
from streams.headers import MESSAGE_ID
from streams.records import pending_reservations, usage_counters
from streams.records.ledger_checks import ForgedRecord, unpack_stored_record
from streams.records.pending_reservations import PendingReservation
from streams.records.token_log import RETRY_TIMEOUT_SECONDS

log = structlog.get_logger()

CHECK_SECONDS = 5.0
# So long the broker certainly recognises what was added to a counter before
RECOVERABLE_SECONDS = topology.LOG_SECONDS - 60
_Accepted = tuple[str, int]  # a request id, and when it was accepted, in epoch milliseconds


class QueueWatch:
    """Tells which requests have certainly left the queues: that they have ended, or never came.

    A request is in REQUESTS, and then in WORK until its ledger record is stored. So it has ended
    when first REQUESTS and then WORK has nothing left of what was in it.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._began = 0.0
        self._last_request: int | None = None
        self._last_work: int | None = None
        self.passed = 0.0

    async def look(self) -> None:
        """Look at the queues once. Raises `BrokerUnavailable`, or `NotFoundError` without them.

        Whatever was queued before `passed`, in epoch seconds, and had its deadline before, has
        left. Each round takes as long as what is in the queues.
        """
        began = self._broker.clock.now()
        requests = (await stream_info(self._broker, topology.REQUESTS)).state
        if self._last_request is None:
            self._began, self._last_request = began, requests.last_seq
        if not _have_left(requests, self._last_request):
            return
        work = (await stream_info(self._broker, topology.WORK)).state
        if self._last_work is None:
            self._last_work = work.last_seq
        if _have_left(work, self._last_work):
            self.passed = self._began
            self._last_request = self._last_work = None


def _have_left(state: StreamState, last: int) -> bool:
    """True if a stream has no message any more up to this sequence."""
    return not state.messages or state.first_seq > last


def _find_ended(message: StoredMessage, wanted: Sequence[PendingReservation]) -> set[_Accepted]:
    """Return which requests a record of the ledger has ended, of those that are wanted.

    A forged one, with a log event, may stand where theirs would be: so it ends all of that id, and
    the counters are not below what was used.
    """
    request_id = message.headers.get(MESSAGE_ID)
    named = [each for each in wanted if each.request_id == request_id]
    if not named:
        return set()
    try:
        record = unpack_stored_record(message.subject, message.data)
    except ForgedRecord as error:
        log.error("ledger_record_unreadable", seq=message.seq, reason=str(error))
        return {(each.request_id, each.reserved_ms) for each in named}
    return {(record.request_id, record.accepted)}


class ReservationRecovery:
    """Gives pending reservations back whose requests were never queued, whoever made them.

    A reservation is given back when its request can be in no queue any more and the ledger has no
    record of it; so the counters are never below what was used. One that is older than the broker
    recognises its additions stays counted.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._queues = QueueWatch(broker)
        self._done: set[str] = set()

    async def run(self) -> None:
        """Look for such reservations every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                await self.recover()
            except (BrokerUnavailable, NotFoundError, StoreRefused) as error:
                log.warning("reservations_not_recovered", reason=str(error))

    async def recover(self) -> None:
        """Give back what can be given back now. Raises as `QueueWatch.look`, and `StoreRefused`.

        What expired less than two calls ago waits for a later one. Idempotent.
        """
        now, passed = self._broker.clock.now(), self._queues.passed
        known = await pending_reservations.read_all(self._broker)
        self._done &= {each.cause for each in known}
        expired = [e for e in known if e.cause not in self._done and e.expires_at <= now]
        if not expired:
            return
        # What has left the queues by an earlier look is in every replica of the ledger by now
        ready = [each for each in expired if each.expires_at <= passed]
        billed = await self._find_billed(ready)
        for each in ready:
            is_billed = (each.request_id, each.reserved_ms) in billed
            if not is_billed and await self._can_be_undone(each):
                await self._undo(each)
            self._done.add(each.cause)
        await self._queues.look()

    async def _undo(self, pending: PendingReservation) -> None:
        reserved, seconds = pending.account.reserved, RETRY_TIMEOUT_SECONDS
        await usage_counters.undo(self._broker, reserved, pending.cause, seconds)
        log.warning("reservation_given_back", request_id=pending.request_id)

    async def _can_be_undone(self, pending: PendingReservation) -> bool:
        """True while its additions are recognised and no record since then was removed."""
        age = self._broker.clock.now() - pending.reserved_ms / 1000
        ledger = (await stream_info(self._broker, topology.LEDGER)).state
        if age < RECOVERABLE_SECONDS and ledger.first_seq <= pending.ledger_seq + 1:
            return True
        log.warning("reservation_stays_counted", request_id=pending.request_id)
        return False

    async def _find_billed(self, wanted: Iterable[PendingReservation]) -> set[_Accepted]:
        """Return those requests of which the ledger has a record, with when each was accepted."""
        by_tenant = defaultdict[str, list[PendingReservation]](list)
        for each in wanted:
            by_tenant[each.account.tenant].append(each)
        found = [await self._find_billed_of(*each) for each in by_tenant.items()]
        return set[_Accepted]().union(*found)

    async def _find_billed_of(
        self, tenant: str, wanted: list[PendingReservation]
    ) -> set[_Accepted]:
        after, pattern = min(each.ledger_seq for each in wanted), subjects.ledgers_of(tenant)
        billed: set[_Accepted] = set()
        while True:
            page = await self._broker.read_filtered(topology.LEDGER, pattern, after)
            for message in page.messages:
                billed |= _find_ended(message, wanted)
            if not page.remaining or not page.messages:
                return billed
            after = page.messages[-1].seq
