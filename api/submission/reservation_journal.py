"""Journal of a process's pending reservations, written ahead of what it adds to counters."""

import asyncio
import secrets

import structlog
from nats.js.errors import NotFoundError

from api.submission.open_reservations import Reservation
from streams import topology
from streams.broker.broker_client import Broker, StoreRefused
from streams.broker.declaration import stream_info
from streams.errors import BrokerUnavailable, Overloaded
from streams.records import pending_reservations
from streams.records.pending_reservations import PendingReservation

log = structlog.get_logger()


class ReservationJournal:
    """Keeps in the broker which reservations on counters of a day or month are pending here.

    One message has them all, and replaces the one before. While it is being stored, whatever else
    changes waits for the next one together, so requests at the same time share it.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker, self._holder = broker, secrets.token_hex(8)
        self._pending: dict[str, PendingReservation] = {}
        self._lock = asyncio.Lock()
        self._changes = self._stored_changes = 0
        self._ledger_seq: int | None = None  # of a record that the ledger has; None: nobody asked

    async def add(self, reservation: Reservation) -> None:
        """Note a reservation, and return once that is stored; does nothing without an account.

        Raises `BrokerUnavailable`, or `Overloaded` if the broker refuses; then nothing may be added
        to a counter under this reservation.
        """
        if reservation.account is None:
            return
        if self._ledger_seq is None:
            self._ledger_seq = await self._read_ledger_seq()
        self._pending[reservation.cause] = PendingReservation(
            reservation.request_id,
            reservation.cause,
            reservation.account.pack(),
            reservation.reserved_ms,
            reservation.expires_at,
            self._ledger_seq,
        )
        self._changes += 1
        try:
            await self._store()
        except BaseException as error:
            self.remove(reservation)
            if isinstance(error, StoreRefused):
                raise Overloaded(f"the broker refuses to note a reservation: {error}") from error
            raise

    def remove(self, reservation: Reservation) -> None:
        """Note that the request was queued, or that all was given back. Idempotent."""
        if self._pending.pop(reservation.cause, None):
            self._changes += 1

    async def tidy(self, now: float) -> None:
        """Best effort: store what has changed; forget what can be given back no more.

        `now` is in epoch seconds. Call it every second, so that little needs to be looked into when
        this process dies.
        """
        for cause, pending in list(self._pending.items()):
            if now >= pending.reserved_ms / 1000 + topology.LOG_SECONDS:
                del self._pending[cause]
                self._changes += 1
        try:
            if self._ledger_seq is not None:
                self._ledger_seq = await self._read_ledger_seq()
            await self._store()
        except (BrokerUnavailable, StoreRefused) as error:
            log.warning("reservations_not_noted", reason=str(error))

    async def _read_ledger_seq(self) -> int:
        try:
            return (await stream_info(self._broker, topology.LEDGER)).state.last_seq
        except NotFoundError as error:
            raise BrokerUnavailable("there is no ledger") from error

    async def _store(self) -> None:
        """Store all changes so far, unless another call has done so meanwhile."""
        wanted = self._changes
        async with self._lock:
            if self._stored_changes >= wanted:
                return
            changes = self._changes
            await pending_reservations.store(self._broker, self._holder, self._pending.values())
            self._stored_changes = changes
