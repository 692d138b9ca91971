"""Counts the requests that this gateway refuses, and stores each second's counts in the ledger.

They stand there in one order with the records of accepted requests, so that whoever replays the
ledger sees both. Nothing else stores what was refused: of a gateway that is killed, the counts of
the last second are lost.
"""

import asyncio
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from gateway.metrics import count_refused
from registry.store import Registry
from streams import messages, subjects
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BrokerUnavailable, ModelNotFound
from streams.headers import MESSAGE_ID
from streams.messages import RefusalCounts

log = structlog.get_logger()

MAX_SECONDS = 60  # that wait to be stored; more are merged into one record

_Kind = tuple[str, str, str]  # error code, version, priority
_Counts = dict[tuple[str, str | None], Counter[_Kind]]  # by tenant and model


@dataclass
class _Period:
    """Counts of the seconds of the epoch from `since` to `until`, both included."""

    since: int
    until: int
    counts: _Counts = field(default_factory=lambda: defaultdict(Counter))

    def add(self, other: "_Period") -> None:
        """Add the counts of a later period to these."""
        self.until = other.until
        for key, counter in other.counts.items():
            self.counts[key].update(counter)


@dataclass(frozen=True)
class _UnsavedRecord:
    subject: str
    payload: bytes
    id: str


class RefusalRecorder:
    """Counts refused requests, and stores the counts of each second while `run` runs.

    `has_room` tells whether the ledger has room for them; while it has none they wait in memory,
    those of many seconds in one record. `gateway` is this gateway's id.
    """

    def __init__(
        self, broker: Broker, registry: Registry, gateway: str, has_room: Callable[[], bool]
    ) -> None:
        self._broker, self._registry = broker, registry
        self._gateway, self._has_room = gateway, has_room
        self._periods: deque[_Period] = deque()
        self._unsaved: deque[_UnsavedRecord] = deque()  # retried until the broker has them
        self._ids = f"{gateway}.{secrets.token_hex(4)}"
        self._number = 0

    def count(self, tenant: str, code: str, model: str = "", priority: str = "") -> None:
        """Count one refused request; returns at once.

        `model` is the name that the client gave; empty if it is not known. What names no registered
        model counts as one other model, so the number of subjects stays bounded.
        """
        count_refused(tenant, code)
        name, version = self._resolve(model)
        self._current().counts[tenant, name][code, version, priority] += 1

    def _resolve(self, name: str) -> tuple[str | None, str]:
        try:
            target = self._registry.resolve_target(name)
        except ModelNotFound:
            return None, ""
        return target.model.name, target.version.id

    def _current(self) -> _Period:
        """The period of the present second, in which requests are counted."""
        second = int(self._broker.clock.now())
        if not self._periods or self._periods[-1].until < second:
            self._periods.append(_Period(second, second))
            if len(self._periods) > MAX_SECONDS:
                first = self._periods.popleft()
                first.add(self._periods.popleft())
                self._periods.appendleft(first)
        return self._periods[-1]

    async def run(self) -> None:
        """Store the counts of each second soon after it has ended, until cancelled."""
        while True:
            now = self._broker.clock.now()
            await asyncio.sleep(1.0 - now % 1.0)
            await self._store_before(int(self._broker.clock.now()))

    async def close(self) -> None:
        """Store all counts, those of the present second too; tries once, and logs what is left."""
        await self._store_before(int(self._broker.clock.now()) + 1)
        lost = sum(c.total() for each in self._periods for c in each.counts.values())
        if lost or self._unsaved:
            log.warning("refusals_not_recorded", refusals=lost, records=len(self._unsaved))

    async def _store_before(self, second: int) -> None:
        """Store the periods that ended before `second`, as far as broker and ledger take them."""
        try:
            while await self._store_unsaved() and self._periods and self._has_room():
                if self._periods[0].until >= second:
                    return
                self._unsaved.extend(self._make_messages(self._periods.popleft()))
        except (BrokerUnavailable, StoreRefused) as error:
            log.warning("refusals_not_stored", reason=str(error))

    async def _store_unsaved(self) -> bool:
        """Store what is left of earlier periods; True when nothing is."""
        while self._unsaved:
            message = self._unsaved[0]
            await self._broker.store(
                message.subject, message.payload, {MESSAGE_ID: message.id}, repeats=True
            )
            self._unsaved.popleft()
        return True

    def _make_messages(self, period: _Period) -> Iterable[_UnsavedRecord]:
        for (tenant, model), counter in period.counts.items():
            self._number += 1
            record = RefusalCounts(
                self._gateway,
                tenant,
                subjects.OTHER if model is None else model,
                period.since,
                period.until,
                [(*kind, count) for kind, count in sorted(counter.items())],
            )
            subject = subjects.outcome(tenant, model)
            yield _UnsavedRecord(subject, messages.pack(record), f"{self._ids}.{self._number}")
