"""What the leader of one model knows: who waits, what is in flight, what the fleet may take. Pure.

A request is charged its expected service when it is taken out of the queue (less if it is beyond
its tenant's part), more when it turns out to take more, and the difference to what it really took
when it is settled.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from dispatcher.affinity import Affinity, Placed, Wish
from dispatcher.fair_queue import OUTPUT_WEIGHT, FairQueue, is_urgent, service
from dispatcher.fleet import Fleet
from dispatcher.lines import Queued
from dispatcher.outlook import Outlook
from dispatcher.placements import InFlight, Placements, Stray
from dispatcher.recent import Recent
from dispatcher.usage import Usage
from streams import subjects
from streams.headers import Envelope
from streams.messages import Beat, LedgerRecord, Pressure
from streams.subjects import ANY, Pool, Priority

VersionFor = Callable[[Queued], str | None]
AGAIN = "again"  # why a request goes where it was sent before
SETTLED_MEMORY_SECONDS = 10.0  # longer than the broker's word of what is in WORK may be old


class Books:
    """One owner's account of a model; times are seconds, epoch for the queue."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.queue, self.fleet, self.outlook = FairQueue(), Fleet(), Outlook()
        self.affinity = Affinity(self.fleet)
        self.in_flight: dict[str, InFlight] = {}
        self._by_seq: dict[int, InFlight] = {}
        self._placements = Placements()
        self._settled = Recent(SETTLED_MEMORY_SECONDS)
        self._usage = Usage()
        self._now = 0.0  # of the last tick

    def next(self, version_for: VersionFor, now: float) -> tuple[Queued, str | None] | None:
        """Who is next, and the version that is to serve it; None for one that is gone.

        What is next at a version that has no room keeps all behind it from that version. What has
        to leave room for other tenants keeps back the heavy, and batch work that does not give way;
        so does what is large and finds too little room at each worker, where it is not a calm
        tenant's.
        """
        full: dict[str, Priority] = {}
        leaving: set[str] = set()
        for item in self.queue.candidates(now):
            version = version_for(item)
            if version is None:
                return item, None
            lane = self.lane(item, version)
            if version in full and not lane.is_above(full[version]):
                continue
            if not self.fleet.fits(version, lane, item.cost):
                full[version] = lane if self.fleet.yields(version) else Priority.INTERACTIVE
                continue
            if self._fills_up(item, version) and not self.fleet.fits_one(version, lane, item.cost):
                leaving.add(version)
                continue
            kept = self._kept_free(item, version, now)
            if kept > -inf and version in leaving and self._fills_up(item, version):
                continue
            if self.fleet.spare(version, lane, item.cost) >= kept:
                return item, version
            leaving.add(version)
        return None

    def lane(self, item: Queued, version: str) -> Priority:
        """The priority of an item among work: what is beyond its tenant's part gives way."""
        division = self.queue.division
        if self.fleet.yields(version) and division.is_beyond_part(item.tenant, item.cost):
            return Priority.BATCH
        return item.priority

    def _kept_free(self, item: Queued, version: str, now: float) -> float:
        """The share of the fleet that must stay free for others if it goes; -inf: nothing."""
        division, yields = self.queue.division, self.fleet.yields(version)
        if division.is_idle or self.queue.starves(item.priority, now):
            return -inf
        if is_urgent(item.priority):
            return division.kept_free(item.tenant, item.cost, yields, now)
        return division.kept_free_of_batch(yields, now)

    def _fills_up(self, item: Queued, version: str) -> bool:
        """Whether it would take, bit by bit, the room that somebody ahead of it waits for."""
        if is_urgent(item.priority):
            return self.queue.division.account(item.tenant).is_heavy
        return not self.fleet.yields(version)

    def beat(self, beat: Beat, now: float) -> None:
        """Take in a worker's heartbeat: its credit, and how far its requests have come."""
        self.fleet.beat(beat, now)
        self.affinity.hear(beat)
        self._resize()
        for reply in beat.taken:
            if flight := self._by_seq.get(subjects.parse_delivery(reply)[1]):
                flight.holder, flight.reply = beat.worker, reply
        for seq, generated in beat.progress:
            if flight := self._by_seq.get(seq):
                flight.told = now
                self._charge(flight, max(flight.charged, service(flight.prompt_tokens, generated)))

    def lose(self, worker: str) -> list[str]:
        """A worker has died: the reply subjects of what it held, to be given back."""
        self.fleet.forget(worker)
        self.affinity.forget(worker)
        self._resize()
        held = [flight for flight in self.in_flight.values() if flight.holder == worker]
        for flight in held:
            flight.holder = ""
        return [flight.reply for flight in held]

    def _resize(self) -> None:
        whole = self.fleet.whole
        self.queue.division.resize(whole.sequences, whole.tokens)

    def take(self, item: Queued, version: str, now: float) -> Priority:
        """Take an item out of the queue, to be sent to a version's pool; says at which priority."""
        lane = self.lane(item, version)
        charged = self.queue.pop(item, now, lane)
        self.fleet.sending(version, lane, item.cost)
        self.outlook.sent(item.cost)
        self.in_flight[item.request_id] = InFlight(
            item.envelope, item.priority, lane, version, charged, dispatched=now
        )
        return lane

    def place(self, request_id: str, marks: Sequence[int], adapter: str) -> Placed:
        """Where to send a request that was taken: to a worker, or to any."""
        flight = self.in_flight[request_id]
        if flight.seq or flight.worker != ANY:  # tried again: the broker may have it already
            return Placed(flight.worker, AGAIN)
        if not (marks or adapter or self.fleet.is_large(flight.version, flight.cost)):
            return Placed()
        wish = Wish(flight.version, flight.lane, flight.cost, marks, adapter)
        placed = self.affinity.choose(wish, self._now)
        if placed.worker != ANY:
            flight.worker = placed.worker
            self.fleet.place(flight.version, flight.lane, flight.cost, placed.worker)
        return placed

    def sent(self, request_id: str, seq: int, duplicate: bool) -> None:
        """It lies in WORK; a duplicate did before, and may have been pulled, or taken back."""
        flight = self.in_flight.get(request_id)
        if flight and not flight.seq:
            if duplicate:
                self._give_room_back(flight)
            else:
                self.fleet.sent(flight.version, flight.lane, seq, flight.cost, flight.worker)
            self._lies_at(flight, seq)

    def not_sent(self, request_id: str) -> None:
        """It could not be sent, or somebody else had done so: nothing is charged."""
        flight = self.in_flight.get(request_id)
        if flight and not flight.seq:
            del self.in_flight[request_id]
            self._give_room_back(flight)
            self.queue.end(flight.tenant, flight.priority, flight.cost)
            self.outlook.sent(-flight.cost)
            self._charge(flight, 0)

    def returned(self, request_id: str, before: int, seq: int) -> None:
        """It was taken back from the worker that it was placed on, and lies in WORK for any.

        It may have been before it was known here that it lay there, as `before`.
        """
        if flight := self.in_flight.get(request_id):
            if not flight.seq:
                self.sent(request_id, before, duplicate=False)
            self.fleet.left({flight.seq})
            self._leaves(flight)
            flight.worker = ANY
            self.fleet.sending(flight.version, flight.lane, flight.cost)
            self.fleet.sent(flight.version, flight.lane, seq, flight.cost)
            self._lies_at(flight, seq)

    def strays(self, now: float) -> list[Stray]:
        """What is to be taken back from workers; it may wait in vain. Epoch seconds."""
        found = self._placements.strays(self.fleet, now)
        for stray in found:
            self.affinity.shun(stray.worker, self._now)
        return found

    def _give_room_back(self, flight: InFlight) -> None:
        self.fleet.not_sent(flight.version, flight.lane, flight.cost, flight.worker)

    def _lies_at(self, flight: InFlight, seq: int) -> None:
        flight.seq, flight.told = seq, self._now
        self._by_seq[seq] = flight
        self._placements.add(flight)

    @property
    def lying(self) -> Mapping[int, InFlight]:
        """What lies in WORK by all that is known, by its sequence there."""
        return self._by_seq

    def _leaves(self, flight: InFlight) -> None:
        """It is in WORK no more, or not where it was."""
        self._by_seq.pop(flight.seq, None)
        self._placements.remove(flight)

    def gone(self, request_id: str, seq: int, now: float) -> None:
        """The broker's own account: it is not in WORK any more; unless it was moved there."""
        if (flight := self.in_flight.get(request_id)) and flight.seq == seq:
            self.settle(request_id, None, now)

    def lies_for(self, request_id: str, seq: int, placement: str) -> None:
        """The broker's own account: an earlier leader may have placed it elsewhere."""
        flight = self.in_flight.get(request_id)
        if flight and flight.seq == seq and flight.worker != placement:
            self._leaves(flight)
            flight.worker = placement
            self._lies_at(flight, seq)

    def settle(self, request_id: str, spent: int | None, now: float) -> None:
        """It has ended: replace what it was charged by what it took, if that is known."""
        flight = self.in_flight.get(request_id)
        if flight is None or not flight.seq:
            return
        del self.in_flight[request_id]
        self._leaves(flight)
        self._settled.add(request_id, now)
        self.queue.end(flight.tenant, flight.priority, flight.cost)
        if spent is not None:
            self.outlook.pace.spent(spent, flight.cost)
            self._usage.add(flight.tenant, spent, now)
            self._charge(flight, spent)
            generated = max(0, spent - flight.prompt_tokens) // OUTPUT_WEIGHT
            self.queue.learn(flight.tenant, generated)

    def _charge(self, flight: InFlight, service: int) -> None:
        """A request in flight costs its tenant so much, whatever was charged before."""
        if service != flight.charged:
            self.queue.charge(flight.tenant, service - flight.charged)
            flight.charged = service

    def learn(self, record: LedgerRecord) -> None:
        """How long a request has taken; call it before the request is settled.

        Work that gives way tells how long it stood aside.
        """
        flight = self.in_flight.get(record.request_id)
        if flight and is_urgent(flight.lane):
            self.outlook.learn(flight.dispatched, flight.cost, record)

    def replay(self, record: LedgerRecord, now: float) -> None:
        """A record of the ledger that an earlier leader may not have known of."""
        spent = service(record.prompt_tokens, record.completion_tokens)
        if record.request_id in self.in_flight:
            self.settle(record.request_id, spent, now)
        elif record.request_id not in self._settled:
            self._settled.add(record.request_id, now)
            self.queue.charge(record.tenant, spent)
            self.queue.learn(record.tenant, record.completion_tokens)

    def adopt(self, envelope: Envelope, pool: Pool, seq: int, placement: str = ANY) -> None:
        """Work of an earlier leader: charge its tenant as that leader did."""
        if envelope.request_id in self.in_flight or envelope.request_id in self._settled:
            return
        tenant, prompt, cost = envelope.tenant, envelope.prompt_tokens, envelope.cost
        lane = pool.priority
        own = Priority(envelope.priority or lane)
        charged = self.queue.begin(tenant, own, lane, prompt, cost)
        flight = InFlight(
            envelope,
            own,
            lane,
            pool.version,
            charged,
            dispatched=envelope.dispatched / 1000,
            worker=placement,
        )
        self.in_flight[envelope.request_id] = flight
        self._lies_at(flight, seq)
        self.fleet.sending(pool.version, lane, cost, placement)
        self.fleet.sent(pool.version, lane, seq, cost, placement)

    def tick(self, now: float) -> list[str]:
        """Let time pass; names the workers that have fallen silent."""
        self._now = now
        self._settled.forget(now)
        silent = self.fleet.forget_stale(now)
        for worker in silent:
            self.affinity.forget(worker)
        self._resize()
        self.outlook.tick(now, self.queue, self.fleet)
        return silent

    def recently_used(self) -> dict[str, float]:
        """Virtual tokens by tenant, of what has ended in about the last minute."""
        return self._usage.recent(self._now)

    def pressure(self) -> Pressure:
        """What the gateways are told: how much waits, and for how long a new request would."""
        return self.outlook.pressure(self.model, self.queue, self.fleet)
