"""Quotas over any number of gateways: reserved before a request is published, settled at its end.

All counting is the broker's (`streams/records/usage_counters.py`). A request's increments travel together, so a
tenant with quotas waits for one more round trip, and one without for none. What a gateway has
reserved and not used it gives back; what it cannot, because it died, is forgotten: requests that
are open with the lease, a minute's with the minute. A day's counters are settled by whoever writes
the ledger.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from api.submission.quota_checks import (
    ConcurrencyCheck,
    PerMinuteCheck,
    QuotaCheck,
    RequestAmounts,
    build_account,
    build_checks,
    quota_scopes,
)
from api.submission.rate_limit_headers import RateLimitHeaders
from api.submission.reservations import Reservation, Reservations
from registry.tenant_records import Tenant
from streams import messages, quota_windows, subjects
from streams.broker.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.records import usage_counters
from streams.records.token_log import RETRY_TIMEOUT_SECONDS
from streams.usage_accounts import Account, Meter

log = structlog.get_logger()

QuotaJob = Callable[[], Awaitable[None]]
EXPIRY_CHECK_SECONDS = 1.0


class Quotas:
    """The reservations of this gateway. `open` it, then `run` it."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._clock = broker, broker.clock
        self._reservations = Reservations()
        self._minute_usage = RateLimitHeaders()
        self._jobs: asyncio.Queue[QuotaJob] = asyncio.Queue()

    async def open(self) -> None:
        await self._broker.subscribe_raw(subjects.ALL_LEDGERS, self._on_ledger)

    async def run(self) -> None:
        """Count what is open in each lease, and give back what is owed; never ends by itself."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew_leases(), name="leases")
            while True:
                job = await self._jobs.get()
                tasks.create_task(_run_best_effort(job), name="owed")

    async def reserve(
        self, tenant: Tenant, request_id: str, amounts: RequestAmounts, seconds: float
    ) -> Reservation | None:
        """Reserve what a request may come to; None if it needs nothing, or has it already.

        The hold ends with the request, or when it is given back; after `seconds` for certain.
        Raises `RateLimited`, `LargerThanQuota`, `BrokerUnavailable`; then nothing is held.
        """
        whose = quota_scopes(tenant)
        if not whose or self._reservations.get(request_id):
            return None
        now = self._clock.now()
        wanted = [check for scope in whose for check in build_checks(scope, amounts)]
        hold = _build_reservation(
            request_id, wanted, build_account(whose, amounts, now), now, seconds
        )
        carried = self._reservations.roll_leases(now)
        self._reservations.add(hold)
        try:
            await self._add_to_new_leases(carried)
            totals = await self._read_totals(hold, wanted, now)
        except BaseException:
            self._undo_unconfirmed(hold)
            raise
        self._raise_refusal(hold, wanted, totals, now)
        return hold

    def packed_account(self, request_id: str) -> str:
        """What the request carries, so that others can settle it; empty if there is nothing."""
        hold = self._reservations.get(request_id)
        return hold.account.pack() if hold and hold.account else ""

    def release(self, hold: Reservation) -> None:
        """Its request did not come in, or another reservation stands for it. Only once."""
        if self._reservations.pop(hold.request_id):
            self._schedule_publish(
                self._reservations.lease_decrements(hold) | _negate(hold.token_increments)
            )
        self._schedule_publish(_negate(hold.request_increments))
        self._schedule_add_once((_negate(_day_increments(hold)), f"{hold.cause}.back"))

    def release_unconfirmed(self, hold: Reservation) -> None:
        """Nobody knows whether its request came in; if it did it is cancelled, and settled then."""
        self._schedule_publish(self._reservations.close_concurrency(hold.request_id))

    def rate_limit_headers(self, tenant: Tenant) -> list[tuple[bytes, bytes]]:
        """The `x-ratelimit-*` headers of a tenant that has quotas per minute; else empty."""
        scopes = quota_scopes(tenant)
        return self._minute_usage.build(scopes, self._clock.now()) if scopes else []

    async def _read_totals(
        self, hold: Reservation, wanted: Sequence[QuotaCheck], now: float
    ) -> dict[str, int]:
        """The new totals of all counters that the checks look at."""
        adds = {
            s: n for check in wanted for s, n in check.increments(now).items()
        } | _day_increments(hold)
        ids = {subject: f"{hold.cause}.{subject}" for subject in _day_increments(hold)}
        counting = (
            usage_counters.add_to_counter(self._broker, s, n, ids.get(s, ""))
            for s, n in adds.items()
        )
        totals: dict[str, int] = {}
        for subject, total in zip(
            adds, await asyncio.gather(*counting, return_exceptions=True), strict=True
        ):
            if isinstance(total, BaseException):
                raise total
            totals[subject] = total
        return totals

    def _raise_refusal(
        self, hold: Reservation, wanted: Sequence[QuotaCheck], totals: Mapping[str, int], now: float
    ) -> None:
        """Raises the refusal that lasts longest, when the hold was given back."""
        refusals = [refusal for check in wanted if (refusal := check.find_refusal(totals, now))]
        for check in wanted:
            if isinstance(check, PerMinuteCheck):
                self._minute_usage.record(check, totals, now, refused=bool(refusals))
        if refusals:
            self.release(hold)
            raise max(refusals, key=lambda refusal: refusal.retry_after_seconds or 0.0)

    def _undo_unconfirmed(self, hold: Reservation) -> None:
        """It is not known what was counted. A lease or a minute forgets it; a day must be told."""
        self._reservations.pop(hold.request_id)
        reserved = _day_increments(hold)
        self._schedule_add_once((reserved, hold.cause), (_negate(reserved), f"{hold.cause}.back"))

    def settle(self, request_id: str, tokens: int) -> None:
        """A request is not open any more, and has used so many tokens. Idempotent."""
        if hold := self._reservations.pop(request_id):
            corrections = {s: tokens - reserved for s, reserved in hold.token_increments.items()}
            self._schedule_publish(self._reservations.lease_decrements(hold) | corrections)

    def _on_ledger(self, subject: bytes, data: bytes, headers: bytes) -> None:
        """Ends what nobody follows here: producers' requests, and those whose client has left."""
        record = messages.unpack(data) if self._reservations else {}
        if self._reservations.get(record.get("request_id", "")):
            tokens = record["prompt_tokens"] + record["completion_tokens"]
            self.settle(record["request_id"], tokens if record["attempts"] else 0)

    async def _renew_leases(self) -> None:
        while True:
            now = self._clock.now()
            await asyncio.sleep(
                min(EXPIRY_CHECK_SECONDS, quota_windows.seconds_until_next_half_slot(now))
            )
            await self._add_to_new_leases(self._reservations.roll_leases(self._clock.now()))
            for hold in self._reservations.list_expired(self._clock.now()):
                self._expire(hold)

    async def _add_to_new_leases(self, amounts: Mapping[str, int]) -> None:
        """Count what is open in the leases that begin to count."""
        cause, seconds = secrets.token_hex(8), quota_windows.SLOT_SECONDS
        if amounts:
            await _run_best_effort(
                lambda: usage_counters.add_once(self._broker, amounts, cause, seconds)
            )

    def _expire(self, hold: Reservation) -> None:
        """Its request must have ended, or never was; who has settled it did it under this cause."""
        log.warning("reservation_expired", request_id=hold.request_id)
        self._reservations.pop(hold.request_id)
        self._schedule_publish(self._reservations.lease_decrements(hold))
        if hold.account:
            self._schedule_add_once((hold.account.correction(0, 0), hold.request_id))

    def _schedule_publish(self, amounts: Mapping[str, int]) -> None:
        """Add soon, in the order of these calls; what gets lost is forgotten with its minute."""

        async def publish() -> None:
            for subject, amount in amounts.items():
                if amount:
                    await self._broker.publish(
                        subject, b"", usage_counters.increment_headers(amount)
                    )

        self._jobs.put_nowait(publish)

    def _schedule_add_once(self, *additions: tuple[Mapping[str, int], str]) -> None:
        """Add soon, each for its cause, in order; for certain if the broker answers in time."""

        async def add() -> None:
            for amounts, cause in additions:
                await usage_counters.add_once(self._broker, amounts, cause, RETRY_TIMEOUT_SECONDS)

        self._jobs.put_nowait(add)


async def _run_best_effort(job: QuotaJob) -> None:
    try:
        await job()
    except (BrokerUnavailable, StoreRefused) as error:
        log.warning("quota_not_counted", reason=str(error))


def _build_reservation(
    request_id: str,
    wanted: Sequence[QuotaCheck],
    account: Account | None,
    now: float,
    seconds: float,
) -> Reservation:
    return Reservation(
        request_id=request_id,
        cause=f"{request_id}.{secrets.token_hex(4)}",
        concurrency_scopes=tuple(
            check.scope for check in wanted if isinstance(check, ConcurrencyCheck)
        ),
        request_increments=_minute_increments(wanted, Meter.REQUESTS, now),
        token_increments=_minute_increments(wanted, Meter.TOKENS, now),
        account=account,
        expires_at=now + seconds,
    )


def _minute_increments(wanted: Sequence[QuotaCheck], meter: Meter, now: float) -> dict[str, int]:
    """What is added to the counters of a minute."""
    found = (
        c.increments(now) for c in wanted if isinstance(c, PerMinuteCheck) and c.meter is meter
    )
    return {subject: amount for adds in found for subject, amount in adds.items() if amount}


def _day_increments(hold: Reservation) -> dict[str, int]:
    return hold.account.reserved if hold.account else {}


def _negate(amounts: Mapping[str, int]) -> dict[str, int]:
    return {subject: -amount for subject, amount in amounts.items()}
