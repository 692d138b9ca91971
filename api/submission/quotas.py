"""Quotas over any number of gateways: reserved before a request is published, settled at its end.

The broker does all counting (`streams/records/usage_counters.py`). A request's increments travel
together, so a tenant with quotas waits for one more round trip, and one without for none. A gateway
gives back what it has reserved and not used. What a dead gateway cannot give back expires: open
requests with their lease, a minute's counts with the minute. Counters of a day or month are settled
by whoever writes the ledger; what was reserved there for a request that was never queued is given
back by any gateway (`reservation_recovery`).
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import structlog

from api.submission.open_reservations import OpenReservations, Reservation
from api.submission.quota_checks import (
    ConcurrencyCheck,
    PeriodCheck,
    PerMinuteCheck,
    QuotaCheck,
    RequestAmounts,
    build_account,
    build_checks,
    quota_scopes,
)
from api.submission.rate_limit_headers import RateLimitHeaders
from api.submission.reservation_journal import ReservationJournal
from api.submission.threshold_recorder import ThresholdRecorder
from registry.tenant_records import Tenant
from streams import messages, quota_windows, subjects
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.records import usage_counters
from streams.records.ledger_checks import unpack_stored_record
from streams.records.quota_thresholds import QuotaThreshold
from streams.records.token_log import RETRY_TIMEOUT_SECONDS
from streams.usage_accounts import Account, Meter

log = structlog.get_logger()

QuotaJob = Callable[[], Awaitable[None]]
_TakeBack = Callable[[Broker, Mapping[str, int], str, float], Awaitable[None]]
EXPIRY_CHECK_SECONDS = 1.0


class Quotas:
    """Reserves and settles the quotas of this gateway's requests, on counters kept by the broker.

    A reservation counts the most that a request may use, before the request is queued. When the
    request ends, the counters are corrected to the real use. Call `open` first; `run` must be
    running, as it publishes all corrections.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker, self._clock = broker, broker.clock
        self._reservations = OpenReservations()
        self._journal = ReservationJournal(broker)
        self._minute_usage = RateLimitHeaders()
        self._jobs: asyncio.Queue[QuotaJob] = asyncio.Queue()
        self._thresholds = ThresholdRecorder(broker)

    async def open(self) -> None:
        """Subscribe to the ledger, the stream of ended requests, whose records end reservations.

        Raises `BrokerUnavailable` if the broker cannot be reached.
        """
        await self._broker.subscribe_raw(subjects.ALL_BILLED, self._on_ledger)

    async def run(self) -> None:
        """Keep the counters right until cancelled: publish corrections and renew leases.

        A lease is a counter for six seconds. Each gateway adds its open requests to every new
        lease, so those of a gateway that died drop out. A correction that the broker does not take
        is logged and dropped, not raised.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew_leases(), name="leases")
            while True:
                job = await self._jobs.get()
                tasks.create_task(_run_best_effort(job), name="corrections")

    async def reserve(
        self,
        tenant: Tenant,
        model: str,
        request_id: str,
        amounts: RequestAmounts,
        seconds: float,
    ) -> Reservation | None:
        """Count the most that a request may use on its tenant's and API key's quotas; check these.

        Waits for one round trip to the broker, and with a quota of a day or month for one before,
        in which that is noted. Returns None, and adds nothing, if neither has quotas or if this
        gateway already has a reservation for `request_id`. The reservation ends when the request
        ends, when it is released, or after `seconds`. Call `confirm` or `release` when it is known
        whether the request is queued. Raises `RateLimited`, `QuotaSpent` or `LargerThanQuota` if a
        quota does not allow the request, and `BrokerUnavailable`. After an error or a cancellation
        the request has no reservation: what was already counted is taken back, or expires within
        two minutes.
        """
        scopes = quota_scopes(tenant)
        if not scopes or self._reservations.get(request_id):
            return None
        now = self._clock.now()
        checks = [check for scope in scopes for check in build_checks(scope, amounts)]
        billed_on = subjects.billed(tenant.name, model)
        reservation = _build_reservation(
            request_id, billed_on, checks, build_account(scopes, amounts, now), now, seconds
        )
        renewals = self._reservations.roll_leases(now)
        self._reservations.add(reservation)
        try:
            await self._add_to_new_leases(renewals)
            await self._journal.add(reservation)
        except BaseException:
            self._reservations.pop(request_id)
            raise
        try:
            totals = await self._read_totals(reservation, checks, now)
        except BaseException:
            self._undo_unconfirmed(reservation)
            raise
        self._raise_refusal(reservation, checks, totals, now)
        return reservation

    def find(self, request_id: str) -> Reservation | None:
        """Return the reservation that this gateway has for a request; None if it has none."""
        return self._reservations.get(request_id)

    def confirm(self, reservation: Reservation) -> None:
        """Note that the request is queued under this reservation, so that its end settles it."""
        self._journal.remove(reservation)

    def release(self, reservation: Reservation) -> None:
        """Give back everything that `reservation` has added to counters.

        For a request that was not accepted, or was already accepted under another reservation.
        Returns at once; `run` publishes the changes. Call it once for a reservation: a second call
        would give its share of the minute's requests back again.
        """
        if self._reservations.pop(reservation.request_id):
            self._schedule_publish(
                self._reservations.lease_decrements(reservation)
                | _negate(reservation.token_increments)
            )
        self._schedule_publish(_negate(reservation.request_increments))
        self._schedule_taking_back(reservation, usage_counters.give_back)

    def release_unconfirmed(self, reservation: Reservation) -> None:
        """Stop counting a request as open if it is unknown whether the broker has accepted it.

        The caller cancels the request in case it was accepted. The rest of its reservation is kept:
        it is settled when the request ends, and recovered if it was never queued. Returns at once;
        `run` publishes the changes.
        """
        self._schedule_publish(self._reservations.close_concurrency(reservation.request_id))

    def rate_limit_headers(self, tenant: Tenant) -> list[tuple[bytes, bytes]]:
        """Return the `x-ratelimit-*` headers (name, value) for a response to a tenant.

        They are built from the use that this gateway saw last, without asking the broker. Empty for
        a tenant without quotas per minute.
        """
        scopes = quota_scopes(tenant)
        return self._minute_usage.build(scopes, self._clock.now()) if scopes else []

    async def _read_totals(
        self, reservation: Reservation, checks: Sequence[QuotaCheck], now: float
    ) -> dict[str, int]:
        """Add the increments; returns the new totals of all counters that the checks read."""
        increments = {
            s: n for check in checks for s, n in check.increments(now).items()
        } | reservation.period_increments
        ids = {
            subject: f"{reservation.cause}.{subject}" for subject in reservation.period_increments
        }
        counting = (
            usage_counters.add_to_counter(self._broker, s, n, ids.get(s, ""))
            for s, n in increments.items()
        )
        totals: dict[str, int] = {}
        for subject, total in zip(
            increments, await asyncio.gather(*counting, return_exceptions=True), strict=True
        ):
            if isinstance(total, BaseException):
                raise total
            totals[subject] = total
        return totals

    def _raise_refusal(
        self,
        reservation: Reservation,
        checks: Sequence[QuotaCheck],
        totals: Mapping[str, int],
        now: float,
    ) -> None:
        """If any check refuses, release the reservation and raise the longest refusal.

        Note what is used, as the checks see it.
        """
        refusals = [refusal for check in checks if (refusal := check.find_refusal(totals, now))]
        for check in checks:
            if isinstance(check, PerMinuteCheck):
                self._minute_usage.record(check, totals, now, refused=bool(refusals))
            elif isinstance(check, PeriodCheck):
                found = check.find_thresholds(totals, now, is_admitted=not refusals)
                self._tell_thresholds(found)
        if refusals:
            self.release(reservation)
            raise max(refusals, key=lambda refusal: refusal.retry_after_seconds or 0.0)

    def _tell_thresholds(self, found: Iterable[QuotaThreshold]) -> None:
        for reached in found:
            if self._thresholds.note(reached):
                self._jobs.put_nowait(partial(self._thresholds.store, reached))

    def _undo_unconfirmed(self, reservation: Reservation) -> None:
        """Undo a reservation of which it is unknown what was counted.

        Leases and minutes expire; a day's counters get what was reserved, then the reverse.
        """
        self._reservations.pop(reservation.request_id)
        self._schedule_taking_back(reservation, usage_counters.undo)

    def settle(self, request_id: str, tokens: int) -> None:
        """End the reservation of a request that has ended, having used `tokens` in all.

        The difference to what was reserved is added to the counters of the minute. Returns at once;
        `run` publishes the changes. Does nothing if there is no reservation for the request here.
        Idempotent.
        """
        if reservation := self._reservations.pop(request_id):
            corrections = {
                s: tokens - reserved for s, reserved in reservation.token_increments.items()
            }
            self._schedule_publish(self._reservations.lease_decrements(reservation) | corrections)

    def _on_ledger(self, subject: bytes, data: bytes, headers: bytes) -> None:
        """Settle requests that nobody reads here: producers' own, and those whose client left.

        A record that names a request of another tenant or model, as a stolen worker may, changes
        nothing.
        """
        record = messages.unpack(data) if self._reservations else {}
        reservation = self._reservations.get(record.get("request_id", ""))
        if reservation and reservation.billed_on == subject.decode():
            billed = unpack_stored_record(reservation.billed_on, data)
            self.settle(billed.request_id, sum(billed.billed_tokens[:2]))

    async def _renew_leases(self) -> None:
        while True:
            now = self._clock.now()
            await asyncio.sleep(
                min(EXPIRY_CHECK_SECONDS, quota_windows.seconds_until_next_half_slot(now))
            )
            await self._add_to_new_leases(self._reservations.roll_leases(self._clock.now()))
            for reservation in self._reservations.list_expired(self._clock.now()):
                self._expire(reservation)
            await self._journal.tidy(self._clock.now())

    async def _add_to_new_leases(self, amounts: Mapping[str, int]) -> None:
        """Best effort: add the open requests to the counters of leases that have begun."""
        cause, seconds = secrets.token_hex(8), quota_windows.SLOT_SECONDS
        if amounts:
            await _run_best_effort(
                lambda: usage_counters.add_once(self._broker, amounts, cause, seconds)
            )

    def _expire(self, reservation: Reservation) -> None:
        """Stop counting a request as open that must have ended or was never accepted.

        Counters of day and month were settled by its end; or the reservation is pending still, and
        is recovered.
        """
        log.warning("reservation_expired", request_id=reservation.request_id)
        self._reservations.pop(reservation.request_id)
        self._schedule_publish(self._reservations.lease_decrements(reservation))

    def _schedule_publish(self, amounts: Mapping[str, int]) -> None:
        """Add to short-lived counters soon, in the order of calls; a lost one expires with them."""

        async def publish() -> None:
            for subject, amount in amounts.items():
                if amount:
                    await self._broker.publish(
                        subject, b"", usage_counters.increment_headers(amount)
                    )

        self._jobs.put_nowait(publish)

    def _schedule_taking_back(self, reservation: Reservation, take_back: _TakeBack) -> None:
        """Take back what is counted of a day and month soon, retrying for a limited time.

        If that fails, the reservation stays pending, and is recovered.
        """

        async def take() -> None:
            reserved = reservation.period_increments
            await take_back(self._broker, reserved, reservation.cause, RETRY_TIMEOUT_SECONDS)
            self._journal.remove(reservation)

        self._jobs.put_nowait(take)


async def _run_best_effort(job: QuotaJob) -> None:
    try:
        await job()
    except (BrokerUnavailable, StoreRefused) as error:
        log.warning("quota_not_counted", reason=str(error))


def _build_reservation(
    request_id: str,
    billed_on: str,
    checks: Sequence[QuotaCheck],
    account: Account | None,
    now: float,
    seconds: float,
) -> Reservation:
    return Reservation(
        request_id=request_id,
        cause=f"{request_id}.{secrets.token_hex(4)}",
        billed_on=billed_on,
        concurrency_scopes=tuple(
            check.scope for check in checks if isinstance(check, ConcurrencyCheck)
        ),
        request_increments=_minute_increments(checks, Meter.REQUESTS, now),
        token_increments=_minute_increments(checks, Meter.TOKENS, now),
        account=account,
        reserved_ms=int(now * 1000),
        expires_at=now + seconds,
    )


def _minute_increments(checks: Sequence[QuotaCheck], meter: Meter, now: float) -> dict[str, int]:
    """The increments of one meter's counters of this minute, without those that only read."""
    minute_checks = [c for c in checks if isinstance(c, PerMinuteCheck) and c.meter is meter]
    return {
        subject: amount
        for check in minute_checks
        for subject, amount in check.increments(now).items()
        if amount
    }


def _negate(amounts: Mapping[str, int]) -> dict[str, int]:
    return {subject: -amount for subject, amount in amounts.items()}
