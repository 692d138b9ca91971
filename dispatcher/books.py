"""What the leader of one model knows: who waits, what is in flight, what the fleet may take. Pure.

A request is charged its expected service when it is taken out of the queue, and the difference to
what it really took when it is settled.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dispatcher.fair_queue import FairQueue, expected_service, service
from dispatcher.fleet import Fleet
from dispatcher.lines import Queued
from dispatcher.outlook import Outlook
from dispatcher.recent import Recent
from dispatcher.usage import Usage
from streams.headers import Envelope
from streams.messages import LedgerRecord, Pressure
from streams.subjects import Pool, Priority

VersionFor = Callable[[Queued], str | None]
SETTLED_MEMORY_SECONDS = 10.0  # longer than the broker's word of what is in WORK may be old


@dataclass(slots=True)
class InFlight:
    """A request that was dispatched and has not ended: what it was charged, what it reserves."""

    tenant: str
    priority: Priority
    version: str
    cost: int
    charged: int
    deadline: int  # epoch ms
    seq: int = 0  # in WORK; 0 while it is on its way there
    dispatched: float = 0.0  # epoch seconds


class Books:
    """One owner's account of a model; times are seconds, epoch for the queue."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.queue, self.fleet, self.outlook = FairQueue(), Fleet(), Outlook()
        self.in_flight: dict[str, InFlight] = {}
        self._settled = Recent(SETTLED_MEMORY_SECONDS)
        self._usage = Usage()
        self._now = 0.0  # of the last tick

    def next(self, version_for: VersionFor, now: float) -> tuple[Queued, str | None] | None:
        """Who is next, and the version that is to serve it; None for one that is gone.

        What is next at a version that has no room keeps all behind it from that version.
        """
        full: set[str | None] = set()
        for item in self.queue.candidates(now):
            version = version_for(item)
            if version is None or (version not in full and self.fleet.fits(version, item.cost)):
                return item, version
            full.add(version)
        return None

    def take(self, item: Queued, version: str, now: float) -> None:
        """Take an item out of the queue, to be sent to a version's pool."""
        self.queue.pop(item, now)
        self.fleet.sending(version, item.cost)
        self.in_flight[item.request_id] = InFlight(
            item.tenant,
            item.priority,
            version,
            item.cost,
            expected_service(item),
            item.deadline,
            dispatched=now,
        )

    def sent(self, request_id: str, seq: int, duplicate: bool) -> None:
        """It lies in WORK; a duplicate did before, and may have been pulled."""
        if flight := self.in_flight.get(request_id):
            flight.seq = seq
            if duplicate:
                self.fleet.not_sent(flight.version, flight.cost)
            else:
                self.fleet.sent(flight.version, flight.priority, seq, flight.cost)

    def not_sent(self, request_id: str) -> None:
        """It could not be sent, or somebody else had done so: nothing is charged."""
        if flight := self.in_flight.pop(request_id, None):
            self.fleet.not_sent(flight.version, flight.cost)
            self.queue.charge(flight.tenant, -flight.charged)

    def settle(self, request_id: str, spent: int | None, now: float) -> None:
        """It has ended: replace what it was charged by what it took, if that is known."""
        flight = self.in_flight.get(request_id)
        if flight is None or not flight.seq:
            return
        del self.in_flight[request_id]
        self._settled.add(request_id, now)
        self.outlook.pace.release(flight.cost, spent)
        if spent is not None:
            self._usage.add(flight.tenant, spent, now)
            self.queue.charge(flight.tenant, spent - flight.charged)

    def learn(self, record: LedgerRecord) -> None:
        """How long a request has taken; call it before the request is settled."""
        if flight := self.in_flight.get(record.request_id):
            self.outlook.learn(flight.dispatched, flight.cost, record)

    def adopt(self, envelope: Envelope, pool: Pool, seq: int) -> None:
        """Work of an earlier leader: charge its tenant as that leader did."""
        if envelope.request_id in self.in_flight or envelope.request_id in self._settled:
            return
        charged = service(envelope.prompt_tokens, envelope.cost - envelope.prompt_tokens)
        self.in_flight[envelope.request_id] = InFlight(
            envelope.tenant,
            pool.priority,
            pool.version,
            envelope.cost,
            charged,
            envelope.deadline,
            seq,
            envelope.dispatched / 1000,
        )
        self.queue.charge(envelope.tenant, charged)
        self.fleet.sending(pool.version, envelope.cost)
        self.fleet.sent(pool.version, pool.priority, seq, envelope.cost)

    def tick(self, now: float) -> list[str]:
        """Let time pass; names the workers that have fallen silent."""
        self._now = now
        self._settled.forget(now)
        silent = self.fleet.forget_stale(now)
        self.outlook.tick(now, len(self.queue) > 0, len(self.fleet.workers()))
        return silent

    def recently_used(self) -> dict[str, float]:
        """Virtual tokens by tenant, of what has ended in about the last minute."""
        return self._usage.recent(self._now)

    def pressure(self) -> Pressure:
        """What the gateways are told: how much waits, and for how long a new request would."""
        return self.outlook.pressure(self.model, self.queue, self.fleet)
