"""What the leader of one model knows: who waits, what is in flight, what the fleet may take. Pure.

A request is charged its expected service when it is taken out of the queue (less if it is beyond
its tenant's part), more when it turns out to take more, and the difference to what it really took
when it is settled.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from dispatcher.estimate.recent_usage import RecentUsage
from dispatcher.estimate.ttl_set import TtlSet
from dispatcher.estimate.wait_estimator import WaitEstimator
from dispatcher.queueing.fair_queue import OUTPUT_WEIGHT, FairQueue, is_urgent, service_tokens
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.workers.fleet import Fleet
from dispatcher.workers.placements import InFlightRequest, PlacedRequests, StrandedWork
from dispatcher.workers.prefix_routing import Placement, PlacementRequest, PrefixRouter
from streams import subjects
from streams.headers import Envelope
from streams.messages import Heartbeat, LedgerRecord, Pressure
from streams.subjects import ANY, PoolKey, Priority

VersionFor = Callable[[QueuedRequest], str | None]
PLACED_BEFORE = "again"  # why a request goes where it was sent before
SETTLED_MEMORY_SECONDS = 10.0  # longer than the broker's word of what is in WORK may be old


class ModelState:
    """One owner's account of a model; times are seconds, epoch for the queue."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.queue, self.fleet, self.estimator = FairQueue(), Fleet(), WaitEstimator()
        self.prefix_router = PrefixRouter(self.fleet)
        self.in_flight: dict[str, InFlightRequest] = {}
        self._by_seq: dict[int, InFlightRequest] = {}
        self._placed = PlacedRequests()
        self._settled = TtlSet(SETTLED_MEMORY_SECONDS)
        self._usage = RecentUsage()
        self._now = 0.0  # of the last tick

    def select_next(
        self, version_for: VersionFor, now: float
    ) -> tuple[QueuedRequest, str | None] | None:
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
            lane = self.choose_work_priority(item, version)
            if version in full and not lane.is_above(full[version]):
                continue
            if not self.fleet.has_room_for(version, lane, item.cost):
                full[version] = lane if self.fleet.preempts_batch(version) else Priority.INTERACTIVE
                continue
            if self._competes_for_room(item, version) and not self.fleet.has_worker_with_room(
                version, lane, item.cost
            ):
                leaving.add(version)
                continue
            kept = self._required_headroom(item, version, now)
            if kept > -inf and version in leaving and self._competes_for_room(item, version):
                continue
            if self.fleet.free_fraction_after(version, lane, item.cost) >= kept:
                return item, version
            leaving.add(version)
        return None

    def choose_work_priority(self, item: QueuedRequest, version: str) -> Priority:
        """The priority of an item among work: what is beyond its tenant's part gives way."""
        division = self.queue.fair_share
        if self.fleet.preempts_batch(version) and division.exceeds_share(item.tenant, item.cost):
            return Priority.BATCH
        return item.priority

    def _required_headroom(self, item: QueuedRequest, version: str, now: float) -> float:
        """The share of the fleet that must stay free for others if it goes; -inf: nothing."""
        division, yields = self.queue.fair_share, self.fleet.preempts_batch(version)
        if division.is_idle or self.queue.is_starving(item.priority, now):
            return -inf
        if is_urgent(item.priority):
            return division.required_headroom(item.tenant, item.cost, yields, now)
        return division.required_headroom_for_batch(yields, now)

    def _competes_for_room(self, item: QueuedRequest, version: str) -> bool:
        """Whether it would take, bit by bit, the room that somebody ahead of it waits for."""
        if is_urgent(item.priority):
            return self.queue.fair_share.get_tenant(item.tenant).is_above_share
        return not self.fleet.preempts_batch(version)

    def apply_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take in a worker's heartbeat: its credit, and how far its requests have come."""
        self.fleet.apply_heartbeat(beat, now)
        self.prefix_router.apply_heartbeat(beat)
        self._update_capacity()
        for reply in beat.taken:
            if flight := self._by_seq.get(subjects.parse_ack_subject(reply)[1]):
                flight.holder, flight.reply = beat.worker, reply
        for seq, generated in beat.progress:
            if flight := self._by_seq.get(seq):
                flight.reported_at = now
                self._adjust_charge(
                    flight, max(flight.charged, service_tokens(flight.prompt_tokens, generated))
                )

    def remove_worker(self, worker: str) -> list[str]:
        """A worker has died: the reply subjects of what it held, to be given back."""
        self.fleet.remove_worker(worker)
        self.prefix_router.remove_worker(worker)
        self._update_capacity()
        held = [flight for flight in self.in_flight.values() if flight.holder == worker]
        for flight in held:
            flight.holder = ""
        return [flight.reply for flight in held]

    def _update_capacity(self) -> None:
        whole = self.fleet.total_capacity
        self.queue.fair_share.set_capacity(whole.sequences, whole.tokens)

    def reserve(self, item: QueuedRequest, version: str, now: float) -> Priority:
        """Take an item out of the queue, to be sent to a version's pool; says at which priority."""
        lane = self.choose_work_priority(item, version)
        charged = self.queue.reserve(item, now, lane)
        self.fleet.reserve(version, lane, item.cost)
        self.estimator.count_reserved(item.cost)
        self.in_flight[item.request_id] = InFlightRequest(
            item.envelope, item.priority, lane, version, charged, dispatched_at=now
        )
        return lane

    def place(self, request_id: str, marks: Sequence[int], adapter: str) -> Placement:
        """Where to send a request that was taken: to a worker, or to any."""
        flight = self.in_flight[request_id]
        if flight.seq or flight.worker != ANY:  # tried again: the broker may have it already
            return Placement(flight.worker, PLACED_BEFORE)
        if not (marks or adapter or self.fleet.is_large(flight.version, flight.cost)):
            return Placement()
        wish = PlacementRequest(flight.version, flight.work_priority, flight.cost, marks, adapter)
        placed = self.prefix_router.choose_worker(wish, self._now)
        if placed.worker != ANY:
            flight.worker = placed.worker
            self.fleet.place(flight.version, flight.work_priority, flight.cost, placed.worker)
        return placed

    def mark_published(self, request_id: str, seq: int, duplicate: bool) -> None:
        """It lies in WORK; a duplicate did before, and may have been pulled, or taken back."""
        flight = self.in_flight.get(request_id)
        if flight and not flight.seq:
            if duplicate:
                self._release_room(flight)
            else:
                self.fleet.mark_published(
                    flight.version, flight.work_priority, seq, flight.cost, flight.worker
                )
            self._add_published(flight, seq)

    def release(self, request_id: str) -> None:
        """It could not be sent, or somebody else had done so: nothing is charged."""
        flight = self.in_flight.get(request_id)
        if flight and not flight.seq:
            del self.in_flight[request_id]
            self._release_room(flight)
            self.queue.release(flight.tenant, flight.priority, flight.cost)
            self.estimator.count_reserved(-flight.cost)
            self._adjust_charge(flight, 0)

    def mark_requeued(self, request_id: str, before: int, seq: int) -> None:
        """It was taken back from the worker that it was placed on, and lies in WORK for any.

        It may have been before it was known here that it lay there, as `before`.
        """
        if flight := self.in_flight.get(request_id):
            if not flight.seq:
                self.mark_published(request_id, before, duplicate=False)
            self.fleet.discard({flight.seq})
            self._remove_published(flight)
            flight.worker = ANY
            self.fleet.reserve(flight.version, flight.work_priority, flight.cost)
            self.fleet.mark_published(flight.version, flight.work_priority, seq, flight.cost)
            self._add_published(flight, seq)

    def find_stranded(self, now: float) -> list[StrandedWork]:
        """What is to be taken back from workers; it may wait in vain. Epoch seconds."""
        found = self._placed.find_stranded(self.fleet, now)
        for stray in found:
            self.prefix_router.avoid(stray.worker, self._now)
        return found

    def _release_room(self, flight: InFlightRequest) -> None:
        self.fleet.release(flight.version, flight.work_priority, flight.cost, flight.worker)

    def _add_published(self, flight: InFlightRequest, seq: int) -> None:
        flight.seq, flight.reported_at = seq, self._now
        self._by_seq[seq] = flight
        self._placed.add(flight)

    @property
    def published(self) -> Mapping[int, InFlightRequest]:
        """What lies in WORK by all that is known, by its sequence there."""
        return self._by_seq

    def _remove_published(self, flight: InFlightRequest) -> None:
        """It is in WORK no more, or not where it was."""
        self._by_seq.pop(flight.seq, None)
        self._placed.remove(flight)

    def settle_missing(self, request_id: str, seq: int, now: float) -> None:
        """The broker's own account: it is not in WORK any more; unless it was moved there."""
        if (flight := self.in_flight.get(request_id)) and flight.seq == seq:
            self.settle(request_id, None, now)

    def correct_placement(self, request_id: str, seq: int, placement: str) -> None:
        """The broker's own account: an earlier leader may have placed it elsewhere."""
        flight = self.in_flight.get(request_id)
        if flight and flight.seq == seq and flight.worker != placement:
            self._remove_published(flight)
            flight.worker = placement
            self._add_published(flight, seq)

    def settle(self, request_id: str, spent: int | None, now: float) -> None:
        """It has ended: replace what it was charged by what it took, if that is known."""
        flight = self.in_flight.get(request_id)
        if flight is None or not flight.seq:
            return
        del self.in_flight[request_id]
        self._remove_published(flight)
        self._settled.add(request_id, now)
        self.queue.release(flight.tenant, flight.priority, flight.cost)
        if spent is not None:
            self.estimator.service_rate.record_service(spent, flight.cost)
            self._usage.add(flight.tenant, spent, now)
            self._adjust_charge(flight, spent)
            generated = max(0, spent - flight.prompt_tokens) // OUTPUT_WEIGHT
            self.queue.learn_output_length(flight.tenant, generated)

    def _adjust_charge(self, flight: InFlightRequest, service: int) -> None:
        """A request in flight costs its tenant so much, whatever was charged before."""
        if service != flight.charged:
            self.queue.charge(flight.tenant, service - flight.charged)
            flight.charged = service

    def learn_duration(self, record: LedgerRecord) -> None:
        """How long a request has taken; call it before the request is settled.

        Work that gives way tells how long it stood aside.
        """
        flight = self.in_flight.get(record.request_id)
        if flight and is_urgent(flight.work_priority):
            self.estimator.learn_duration(flight.dispatched_at, flight.cost, record)

    def replay(self, record: LedgerRecord, now: float) -> None:
        """A record of the ledger that an earlier leader may not have known of."""
        spent = service_tokens(record.prompt_tokens, record.completion_tokens)
        if record.request_id in self.in_flight:
            self.settle(record.request_id, spent, now)
        elif record.request_id not in self._settled:
            self._settled.add(record.request_id, now)
            self.queue.charge(record.tenant, spent)
            self.queue.learn_output_length(record.tenant, record.completion_tokens)

    def adopt(self, envelope: Envelope, pool: PoolKey, seq: int, placement: str = ANY) -> None:
        """Work of an earlier leader: charge its tenant as that leader did."""
        if envelope.request_id in self.in_flight or envelope.request_id in self._settled:
            return
        tenant, prompt, cost = envelope.tenant, envelope.prompt_tokens, envelope.cost
        lane = pool.priority
        own = Priority(envelope.priority or lane)
        charged = self.queue.charge_in_flight(tenant, own, lane, prompt, cost)
        flight = InFlightRequest(
            envelope,
            own,
            lane,
            pool.version,
            charged,
            dispatched_at=envelope.dispatched / 1000,
            worker=placement,
        )
        self.in_flight[envelope.request_id] = flight
        self._add_published(flight, seq)
        self.fleet.reserve(pool.version, lane, cost, placement)
        self.fleet.mark_published(pool.version, lane, seq, cost, placement)

    def tick(self, now: float) -> list[str]:
        """Let time pass; names the workers that have fallen silent."""
        self._now = now
        self._settled.expire(now)
        silent = self.fleet.remove_stale_workers(now)
        for worker in silent:
            self.prefix_router.remove_worker(worker)
        self._update_capacity()
        self.estimator.tick(now, self.queue, self.fleet)
        return silent

    def recent_usage(self) -> dict[str, float]:
        """Virtual tokens by tenant, of what has ended in about the last minute."""
        return self._usage.snapshot(self._now)

    def build_pressure(self) -> Pressure:
        """What the gateways are told: how much waits, and for how long a new request would."""
        return self.estimator.build_pressure(self.model, self.queue, self.fleet)
