"""Quotas over any number of gateways: reserved before a request is published, settled at its end.

All counting is the broker's (`streams/usage.py`). A request's increments travel together, so a
tenant with quotas waits for one more round trip, and one without for none. What a gateway has
reserved and not used it gives back; what it cannot, because it died, is forgotten: requests that
are open with the lease, a minute's with the minute. A day's counters are settled by whoever writes
the ledger.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from starlette.types import Message, Send

from gateway.checks import Amounts, Check, Concurrent, PerMinute, account, checks, scopes
from gateway.following import Record, Sink
from gateway.holds import Hold, Holds
from gateway.rate_limits import RateLimits
from registry.tenants import Tenant
from streams import messages, subjects, usage, windows
from streams.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.token_log import PATIENCE_SECONDS
from streams.usage import Account, Meter

log = structlog.get_logger()

Job = Callable[[], Awaitable[None]]
EXPIRE_SECONDS = 1.0


class Quotas:
    """The reservations of this gateway. `open` it, then `run` it."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._clock = broker, broker.clock
        self._holds = Holds()
        self._seen = RateLimits()
        self._owed: asyncio.Queue[Job] = asyncio.Queue()

    async def open(self) -> None:
        await self._broker.subscribe_direct(subjects.ALL_LEDGERS, self._on_ledger)

    async def run(self) -> None:
        """Count what is open in each lease, and give back what is owed; never ends by itself."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew(), name="leases")
            while True:
                job = await self._owed.get()
                tasks.create_task(_forgivingly(job), name="owed")

    async def reserve(
        self, tenant: Tenant, request_id: str, amounts: Amounts, seconds: float
    ) -> Hold | None:
        """Reserve what a request may come to; None if it needs nothing, or has it already.

        The hold ends with the request, or when it is given back; after `seconds` for certain.
        Raises `RateLimited`, `LargerThanQuota`, `BrokerUnavailable`; then nothing is held.
        """
        whose = scopes(tenant)
        if not whose or self._holds.get(request_id):
            return None
        now = self._clock.now()
        wanted = [check for scope in whose for check in checks(scope, amounts)]
        hold = _hold(request_id, wanted, account(whose, amounts, now), now, seconds)
        carried = self._holds.roll(now)
        self._holds.add(hold)
        try:
            await self._carry(carried)
            totals = await self._count(hold, wanted, now)
        except BaseException:
            self._abandon(hold)
            raise
        self._judge(hold, wanted, totals, now)
        return hold

    def account(self, request_id: str) -> str:
        """What the request carries, so that others can settle it; empty if there is nothing."""
        hold = self._holds.get(request_id)
        return hold.account.pack() if hold and hold.account else ""

    def give_back(self, hold: Hold) -> None:
        """Its request did not come in, or another reservation stands for it. Only once."""
        if self._holds.pop(hold.request_id):
            self._publish(self._holds.closed(hold) | _negative(hold.tokens))
        self._publish(_negative(hold.requests))
        self._add_once((_negative(_reserved(hold)), f"{hold.cause}.back"))

    def doubt(self, hold: Hold) -> None:
        """Nobody knows whether its request came in; if it did it is cancelled, and settled then."""
        self._publish(self._holds.release(hold.request_id))

    def noting(self, tenant: Tenant, request_id: str, sink: Sink) -> Sink:
        """A sink that also sees the request's end, before its client does."""
        if not scopes(tenant):
            return sink

        def put(record: Record, size: int) -> bool:
            if record["type"] in messages.TERMINALS:
                self._ended(request_id, record["usage"]["total_tokens"])
            return sink(record, size)

        return put

    def announcing(self, tenant: Tenant, send: Send) -> Send:
        """`send`, with the `x-ratelimit-*` of a tenant that has quotas per minute."""
        whose = scopes(tenant)
        if not whose:
            return send

        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = self._seen.headers(whose, self._clock.now())
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        return put

    async def _count(self, hold: Hold, wanted: Sequence[Check], now: float) -> dict[str, int]:
        """The new totals of all counters that the checks look at."""
        adds = {s: n for check in wanted for s, n in check.adds(now).items()} | _reserved(hold)
        ids = {subject: f"{hold.cause}.{subject}" for subject in _reserved(hold)}
        counting = (usage.add(self._broker, s, n, ids.get(s, "")) for s, n in adds.items())
        totals: dict[str, int] = {}
        for subject, total in zip(
            adds, await asyncio.gather(*counting, return_exceptions=True), strict=True
        ):
            if isinstance(total, BaseException):
                raise total
            totals[subject] = total
        return totals

    def _judge(
        self, hold: Hold, wanted: Sequence[Check], totals: Mapping[str, int], now: float
    ) -> None:
        """Raises the refusal that lasts longest, when the hold was given back."""
        refusals = [refusal for check in wanted if (refusal := check.refusal(totals, now))]
        for check in wanted:
            if isinstance(check, PerMinute):
                self._seen.see(check, totals, now, refused=bool(refusals))
        if refusals:
            self.give_back(hold)
            raise max(refusals, key=lambda refusal: refusal.retry_after_seconds or 0.0)

    def _abandon(self, hold: Hold) -> None:
        """It is not known what was counted. A lease or a minute forgets it; a day must be told."""
        self._holds.pop(hold.request_id)
        reserved = _reserved(hold)
        self._add_once((reserved, hold.cause), (_negative(reserved), f"{hold.cause}.back"))

    def _ended(self, request_id: str, tokens: int) -> None:
        """A request is not open any more, and has used so many tokens. Idempotent."""
        if hold := self._holds.pop(request_id):
            corrections = {s: tokens - reserved for s, reserved in hold.tokens.items()}
            self._publish(self._holds.closed(hold) | corrections)

    def _on_ledger(self, subject: bytes, data: bytes, headers: bytes) -> None:
        """Ends what nobody follows here: producers' requests, and those whose client has left."""
        record = messages.unpack(data) if self._holds else {}
        if self._holds.get(record.get("request_id", "")):
            tokens = record["prompt_tokens"] + record["completion_tokens"]
            self._ended(record["request_id"], tokens if record["attempts"] else 0)

    async def _renew(self) -> None:
        while True:
            now = self._clock.now()
            await asyncio.sleep(min(EXPIRE_SECONDS, windows.until_next_half(now)))
            await self._carry(self._holds.roll(self._clock.now()))
            for hold in self._holds.expired(self._clock.now()):
                self._expire(hold)

    async def _carry(self, amounts: Mapping[str, int]) -> None:
        """Count what is open in the leases that begin to count."""
        cause, seconds = secrets.token_hex(8), windows.LEASE_SECONDS
        if amounts:
            await _forgivingly(lambda: usage.add_once(self._broker, amounts, cause, seconds))

    def _expire(self, hold: Hold) -> None:
        """Its request must have ended, or never was; who has settled it did it under this cause."""
        log.warning("reservation_expired", request_id=hold.request_id)
        self._holds.pop(hold.request_id)
        self._publish(self._holds.closed(hold))
        if hold.account:
            self._add_once((hold.account.correction(0, 0), hold.request_id))

    def _publish(self, amounts: Mapping[str, int]) -> None:
        """Add soon, in the order of these calls; what gets lost is forgotten with its minute."""

        async def publish() -> None:
            for subject, amount in amounts.items():
                if amount:
                    await self._broker.publish(subject, b"", usage.increment(amount))

        self._owed.put_nowait(publish)

    def _add_once(self, *additions: tuple[Mapping[str, int], str]) -> None:
        """Add soon, each for its cause, in order; for certain if the broker answers in time."""

        async def add() -> None:
            for amounts, cause in additions:
                await usage.add_once(self._broker, amounts, cause, PATIENCE_SECONDS)

        self._owed.put_nowait(add)


async def _forgivingly(job: Job) -> None:
    try:
        await job()
    except (BrokerUnavailable, StoreRefused) as error:
        log.warning("quota_not_counted", reason=str(error))


def _hold(
    request_id: str, wanted: Sequence[Check], account: Account | None, now: float, seconds: float
) -> Hold:
    return Hold(
        request_id=request_id,
        cause=f"{request_id}.{secrets.token_hex(4)}",
        concurrent=tuple(check.scope for check in wanted if isinstance(check, Concurrent)),
        requests=_added(wanted, Meter.REQUESTS, now),
        tokens=_added(wanted, Meter.TOKENS, now),
        account=account,
        expires=now + seconds,
    )


def _added(wanted: Sequence[Check], meter: Meter, now: float) -> dict[str, int]:
    """What is added to the counters of a minute."""
    found = (c.adds(now) for c in wanted if isinstance(c, PerMinute) and c.meter is meter)
    return {subject: amount for adds in found for subject, amount in adds.items() if amount}


def _reserved(hold: Hold) -> dict[str, int]:
    return hold.account.reserved if hold.account else {}


def _negative(amounts: Mapping[str, int]) -> dict[str, int]:
    return {subject: -amount for subject, amount in amounts.items()}
