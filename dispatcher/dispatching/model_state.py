"""All that the leader of one model knows: queue, fleet, requests in flight, estimates. Pure.

A request is charged its expected service when it is reserved (less if it exceeds its tenant's
share), more when it turns out to take more, and the difference to what it really took when it is
settled.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from dispatcher.estimate.recent_usage import RecentUsage
from dispatcher.estimate.ttl_set import TtlSet
from dispatcher.estimate.wait_estimator import WaitEstimator
from dispatcher.queueing.fair_queue import OUTPUT_WEIGHT, FairQueue, is_urgent, service_tokens
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.workers.fleet import Fleet
from dispatcher.workers.placed_requests import InFlightRequest, PlacedRequests, Stage, StrandedWork
from dispatcher.workers.prefix_routing import Placement, PlacementRequest, PrefixRouter
from streams.delivery_reply import DeliveryReply
from streams.headers import Envelope
from streams.messages import Heartbeat, LedgerRecord, Pressure
from streams.subjects import ANY, PoolKey, Priority

ResolveVersion = Callable[[QueuedRequest], str | None]
PLACED_BEFORE = "again"  # the reason of a placement that is repeated
TYPICAL_OUTPUT = 256  # tokens that a request is taken to generate, before any has ended
SETTLED_MEMORY_SECONDS = 10.0  # longer than the broker's answer about WORK may be out of date


class ModelState:
    """The state of one model: queued requests, workers, requests in flight and estimates.

    Its leader owns it and reports every event by a method call. A request is enqueued in `queue`,
    then reserved (taken from the queue, its tenant charged, its room counted), placed (its worker
    chosen), published (stored in the stream WORK) and settled (ended); or released if it was not
    published. From its reservation to its end it is in flight. Times are seconds: epoch for the
    queue and for `select_next`, `reserve` and `find_stranded`, monotonic for `apply_heartbeat`,
    `tick`, `settle`, `settle_missing` and `replay`.
    """

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
        self, resolve_version: ResolveVersion, now: float
    ) -> tuple[QueuedRequest, str | None] | None:
        """Return the next request and the version to serve it; None if no request may be sent now.

        Requests are tried in fair order (`FairQueue.candidates`) at the time `now` (epoch seconds).
        Nothing is removed from the queue. `resolve_version` gives the id of the version that would
        serve a request; where it gives None, the request is returned with None, for the caller to
        end it.

        A request whose version has no room holds back all later requests for that version; where
        engines preempt batch work, only the equally or less urgent ones. A request is passed over
        if it would not leave the headroom that its tenant owes the others. So is one that no single
        worker has room for at once, if its tenant is above its share or it is batch work that is
        not preempted. Once one was passed over, so is every later one for its version that owes
        headroom and whose tenant is above its share, or that is batch work not preempted.
        """
        full: dict[str, Priority] = {}
        kept_free: set[str] = set()
        self.queue.capacity_shares.advance(now)
        for item in self.queue.candidates(now):
            version = resolve_version(item)
            if version is None:
                return item, None
            work_priority = self.choose_work_priority(item, version)
            if version in full and not work_priority.is_above(full[version]):
                continue
            if not self.fleet.has_room_for(version, work_priority, item.cost):
                full[version] = (
                    work_priority if self.fleet.preempts_batch(version) else Priority.INTERACTIVE
                )
                continue
            if self._competes_for_room(item, version) and not self.fleet.has_worker_with_room(
                version, work_priority, item.cost
            ):
                kept_free.add(version)
                continue
            headroom = self._required_headroom(item, version, now)
            if headroom > -inf and version in kept_free and self._competes_for_room(item, version):
                continue
            if self.fleet.free_fraction_after(version, work_priority, item.cost) >= headroom:
                return item, version
            kept_free.add(version)
        return None

    def choose_work_priority(self, item: QueuedRequest, version: str) -> Priority:
        """Return the priority at which workers will run a request: its own, or batch.

        It is batch for a request that takes its tenant beyond its fair share, if the engines of the
        version preempt batch work for more urgent work.
        """
        shares = self.queue.capacity_shares
        if self.fleet.preempts_batch(version) and shares.exceeds_share(item.tenant, item.cost):
            return Priority.BATCH
        return item.priority

    def _required_headroom(self, item: QueuedRequest, version: str, now: float) -> float:
        """The fraction of the fleet that must stay free if the request is sent; -inf: nothing."""
        if self.queue.capacity_shares.is_idle or self.queue.is_starving(item.priority, now):
            return -inf
        preempts_batch = self.fleet.preempts_batch(version)
        return self.queue.required_headroom(item.tenant, item.priority, item.cost, preempts_batch)

    def kept_tokens(self, item: QueuedRequest, version: str) -> float:
        """Return how many of the fleet's KV tokens are kept free of a request, for other tenants.

        0 if none are. `version` is the model version that would serve it.
        """
        preempts_batch = self.fleet.preempts_batch(version)
        headroom = self.queue.required_headroom(
            item.tenant, item.priority, item.cost, preempts_batch
        )
        return max(0.0, headroom) * self.fleet.total_capacity.tokens

    def _competes_for_room(self, item: QueuedRequest, version: str) -> bool:
        """True if the request would take, bit by bit, room that an earlier one waits for."""
        if is_urgent(item.priority):
            return self.queue.capacity_shares.get_tenant(item.tenant).is_above_share
        return not self.fleet.preempts_batch(version)

    def apply_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Update the state from a worker's heartbeat, received at `now` (monotonic seconds).

        The heartbeat tells what the worker has free and has cached, what it has pulled, and how
        many tokens its requests have generated. A request that has taken more service than its
        tenant was charged is charged the rest.
        """
        self.fleet.apply_heartbeat(beat, now)
        self.prefix_router.apply_heartbeat(beat)
        self._update_capacity()
        for reply in beat.taken:
            if flight := self._by_seq.get(DeliveryReply.parse(reply).seq):
                flight.holder, flight.reply = beat.worker, reply
        for seq, generated in beat.progress:
            if flight := self._by_seq.get(seq):
                flight.reported_at = now
                self._record_advance(flight, self._done_fraction(flight, generated))
                self._adjust_charge(
                    flight, max(flight.charged, service_tokens(flight.prompt_tokens, generated))
                )

    def _done_fraction(self, flight: InFlightRequest, generated: int) -> float:
        """The part of a request's expected service that it has got with so many tokens."""
        mean = self.queue.mean_output(flight.tenant)
        expected = min(
            flight.cost - flight.prompt_tokens, TYPICAL_OUTPUT if mean is None else round(mean)
        )
        whole = service_tokens(flight.prompt_tokens, max(expected, generated))
        return service_tokens(flight.prompt_tokens, generated) / max(1, whole)

    def _record_advance(self, flight: InFlightRequest, done_fraction: float) -> None:
        advance = max(0.0, done_fraction - flight.done_fraction)
        self.estimator.service_rate.record_advanced(advance * flight.cost)
        flight.done_fraction += advance

    def remove_worker(self, worker: str, version: str | None = None) -> list[str]:
        """Remove a worker that has ended; return the reply subjects of the requests that it held.

        With a `version`, only as a worker of that one, which it serves no longer.

        If the worker has died, the caller publishes a NAK on each, so that the broker delivers the
        request to another worker; a drained one has returned its requests itself. The requests stay
        in flight. An unknown worker gives an empty list.
        """
        self.fleet.remove_worker(worker, version)
        self.prefix_router.remove_worker(worker)
        self._update_capacity()
        held = [
            flight
            for flight in self.in_flight.values()
            if flight.holder == worker and version in (None, flight.version)
        ]
        for flight in held:
            flight.holder = ""
        return [flight.reply for flight in held]

    def _update_capacity(self) -> None:
        total = self.fleet.total_capacity
        self.queue.capacity_shares.set_capacity(total.sequences, total.tokens)

    def reserve(self, item: QueuedRequest, version: str, now: float) -> Priority:
        """Take a request from the queue, charge its tenant, and count its room as used.

        Returns the priority at which workers will run it. The caller then places and publishes the
        request, or releases it. `now` is epoch seconds. Raises KeyError if the request is not
        queued.
        """
        work_priority = self.choose_work_priority(item, version)
        charged = self.queue.reserve(item, now, work_priority)
        self.fleet.reserve(version, work_priority, item.cost)
        self.estimator.count_reserved(item.cost)
        self.in_flight[item.request_id] = InFlightRequest(
            item.envelope, item.priority, work_priority, version, charged, dispatched_at=now
        )
        return work_priority

    def place(self, request_id: str, prefix_hashes: Sequence[int], adapter: str) -> Placement:
        """Choose the worker that a reserved request is published for, or any, and return it.

        The result also has the reason. A request that was placed on a worker or published before
        keeps its placement, since the broker may have stored it already. `prefix_hashes` are those
        of its prompt; `adapter` is the name of its LoRA adapter, or empty. Raises KeyError for a
        request that is not in flight.
        """
        flight = self.in_flight[request_id]
        if flight.stage > Stage.RESERVED:  # a retry: the broker may have stored it already
            return Placement(flight.worker, PLACED_BEFORE)
        if not (prefix_hashes or adapter or self.fleet.is_large(flight.version, flight.cost)):
            return Placement()
        request = PlacementRequest(
            flight.version, flight.work_priority, flight.cost, prefix_hashes, adapter
        )
        placement = self.prefix_router.choose_worker(request, self._now)
        if placement.worker != ANY:
            flight.worker = placement.worker
            self.fleet.place(flight.version, flight.work_priority, flight.cost, placement.worker)
        return placement

    def mark_published(self, request_id: str, seq: int, duplicate: bool) -> None:
        """Record that a reserved request is stored in the stream WORK with sequence `seq`.

        A `duplicate` was stored there before, so that it may have been pulled or taken back: its
        room no longer counts as used. Ignored for an unknown request and for one published before.
        """
        flight = self.in_flight.get(request_id)
        if flight and flight.stage < Stage.PUBLISHED:
            if duplicate:
                self._release_room(flight)
            else:
                self.fleet.mark_published(
                    flight.version, flight.work_priority, seq, flight.cost, flight.worker
                )
            self._add_published(flight, seq)

    def release(self, request_id: str) -> None:
        """Undo a request's reservation, and its charge, since this leader did not publish it.

        The request does not return to the queue. Ignored for an unknown or a published request.
        """
        flight = self.in_flight.get(request_id)
        if flight and flight.stage < Stage.PUBLISHED:
            del self.in_flight[request_id]
            self._release_room(flight)
            self.queue.release(flight.tenant, flight.priority, flight.cost)
            self.estimator.count_reserved(-flight.cost)
            self._adjust_charge(flight, 0)

    def mark_requeued(self, request_id: str, previous_seq: int, seq: int) -> None:
        """Record that a request was taken back from its worker and is in WORK for any worker again.

        `previous_seq` and `seq` are its sequences in WORK before and now. If this leader had not
        learned of the first publish yet, it is recorded before. An unknown request is ignored.
        """
        if flight := self.in_flight.get(request_id):
            if flight.stage < Stage.PUBLISHED:
                self.mark_published(request_id, previous_seq, duplicate=False)
            self.fleet.discard({flight.seq})
            self._remove_published(flight)
            flight.worker, flight.holder, flight.reply = ANY, "", ""
            self.fleet.reserve(flight.version, flight.work_priority, flight.cost)
            self.fleet.mark_published(flight.version, flight.work_priority, seq, flight.cost)
            self._add_published(flight, seq)

    def find_stranded(self, now: float) -> list[StrandedWork]:
        """Return the requests to take back from workers that do not serve them; empty if none.

        For `AVOID_SECONDS` the prefix router places nothing more on those workers. `now` is epoch
        seconds.
        """
        found = self._placed.find_stranded(self.fleet, now)
        for work in found:
            self.prefix_router.avoid(work.worker, self._now)
        return found

    def has_placed(self, worker: str, version: str) -> bool:
        """Return True if a request lies in WORK that was placed on a worker."""
        return self._placed.has_any(worker, version)

    def _release_room(self, flight: InFlightRequest) -> None:
        self.fleet.release(flight.version, flight.work_priority, flight.cost, flight.worker)

    def _add_published(self, flight: InFlightRequest, seq: int) -> None:
        flight.seq, flight.reported_at = seq, self._now
        self._by_seq[seq] = flight
        self._placed.add(flight)

    @property
    def published(self) -> Mapping[int, InFlightRequest]:
        """The requests in flight that are stored in WORK, by their sequence there; not a copy.

        An earlier leader's requests are missing until they are adopted.
        """
        return self._by_seq

    def _remove_published(self, flight: InFlightRequest) -> None:
        """Forget where a request lies in WORK: it has left, or lies elsewhere."""
        self._by_seq.pop(flight.seq, None)
        self._placed.remove(flight)

    def settle_missing(self, request_id: str, seq: int, now: float) -> None:
        """Record that a request has ended, because the broker no longer has it in WORK as `seq`.

        Its tenant's charge stays. Ignored if the request is unknown or has another sequence by now.
        `now` is monotonic seconds.
        """
        if (flight := self.in_flight.get(request_id)) and flight.seq == seq:
            self.settle(request_id, None, now)

    def correct_placement(self, request_id: str, seq: int, placement: str) -> None:
        """Set the worker that a request was published for to the one that the broker names.

        The two may differ where an earlier leader published it. `placement` is a worker, or any.
        Ignored if the request is unknown or has another sequence than `seq`.
        """
        flight = self.in_flight.get(request_id)
        if flight and flight.seq == seq and flight.worker != placement:
            self._remove_published(flight)
            flight.worker = placement
            self._add_published(flight, seq)

    def settle(self, request_id: str, service: int | None, now: float) -> None:
        """Record that a published request has ended, and set its tenant's charge to `service`.

        `service` is in virtual tokens (prompt + 2 * generated); with None the charge stays. Ignored
        for a request that is unknown or not published. `now` is monotonic seconds.
        """
        flight = self.in_flight.get(request_id)
        if flight is None or flight.stage < Stage.PUBLISHED:
            return
        del self.in_flight[request_id]
        self._remove_published(flight)
        self._settled.add(request_id, now)
        self._record_advance(flight, 1.0)
        self.queue.release(flight.tenant, flight.priority, flight.cost)
        if service is not None:
            self.estimator.service_rate.record_service(service, flight.cost)
            self._usage.add(flight.tenant, service, now)
            self._adjust_charge(flight, service)
            generated = max(0, service - flight.prompt_tokens) // OUTPUT_WEIGHT
            self.queue.learn_output_length(flight.tenant, generated)

    def _adjust_charge(self, flight: InFlightRequest, service: int) -> None:
        """Make a tenant pay `service` for a request in flight, whatever was charged before."""
        if service != flight.charged:
            self.queue.charge(flight.tenant, service - flight.charged)
            flight.charged = service

    def learn_duration(self, record: LedgerRecord) -> None:
        """Learn from a ledger record how long its request has taken; call it before `settle`.

        Ignored if the request is not in flight, or ran at batch priority, where it may have been
        preempted for long.
        """
        flight = self.in_flight.get(record.request_id)
        if flight and is_urgent(flight.work_priority):
            self.estimator.learn_duration(flight.dispatched_at, flight.cost, record)

    def replay(self, record: LedgerRecord, now: float) -> None:
        """Apply the ledger record of a request that ended after the predecessor's checkpoint.

        A request in flight is settled; any other is charged to its tenant. A record that comes
        again within `SETTLED_MEMORY_SECONDS` (10 s) is ignored. `now` is monotonic seconds.
        """
        service = service_tokens(record.prompt_tokens, record.completion_tokens)
        if record.request_id in self.in_flight:
            self.settle(record.request_id, service, now)
        elif record.request_id not in self._settled:
            self._settled.add(record.request_id, now)
            self.queue.charge(record.tenant, service)
            self.queue.learn_output_length(record.tenant, record.completion_tokens)

    def adopt(self, envelope: Envelope, pool: PoolKey, seq: int, placement: str = ANY) -> None:
        """Count a request that an earlier leader has published as in flight, and charge its tenant.

        `pool` names the version and the priority in WORK, `seq` its sequence there, and `placement`
        the worker it is for, or any. Ignored if the request is in flight already, or was settled in
        the last `SETTLED_MEMORY_SECONDS` (10 s).
        """
        if envelope.request_id in self.in_flight or envelope.request_id in self._settled:
            return
        tenant, prompt, cost = envelope.tenant, envelope.prompt_tokens, envelope.cost
        work_priority = pool.priority
        priority = Priority(envelope.priority or work_priority)
        charged = self.queue.charge_in_flight(tenant, priority, work_priority, prompt, cost)
        flight = InFlightRequest(
            envelope,
            priority,
            work_priority,
            pool.version,
            charged,
            dispatched_at=envelope.dispatched / 1000,
            worker=placement,
        )
        self.in_flight[envelope.request_id] = flight
        self._add_published(flight, seq)
        self.fleet.reserve(pool.version, work_priority, cost, placement)
        self.fleet.mark_published(pool.version, work_priority, seq, cost, placement)

    def tick(self, now: float) -> list[str]:
        """Advance the time to `now` (monotonic seconds): update estimates, remove silent workers.

        Returns the names of the workers that were removed because their heartbeats have stopped.
        """
        self._now = now
        self._settled.expire(now)
        silent = self.fleet.remove_stale_workers(now)
        for worker in silent:
            self.prefix_router.remove_worker(worker)
        self._update_capacity()
        self.estimator.tick(now, self.queue, self.fleet)
        return silent

    def recent_usage(self) -> dict[str, float]:
        """Return each tenant's service in about the last minute, in virtual tokens.

        Requests that have ended count. Tenants that have used nothing are left out.
        """
        return self._usage.snapshot(self._now)

    def build_pressure(self) -> Pressure:
        """Return the load report for gateways: queued requests, and estimated waits of new ones.

        Waits are in seconds, None where they cannot be estimated yet.
        """
        return self.estimator.build_pressure(self.model, self.queue, self.fleet)
