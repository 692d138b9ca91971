"""The leader of a model on the virtual clock: the real `ModelState`, driven as in `dispatcher/`.

It does what `dispatcher/model_dispatcher.py` and `dispatcher/dispatching/dispatch_loop.py` do,
without their broker. Every call of the scheduler is in this file.
"""

import itertools
from collections.abc import Callable, Mapping

from bench.simulation.delays import Delays
from bench.simulation.virtual_clock import VirtualClock
from bench.simulation.work_stream import WorkStream
from bench.simulation.worker import VERSION
from dispatcher.dispatching.dispatch_loop import MAX_CONCURRENT_DISPATCHES
from dispatcher.dispatching.model_state import ModelState
from dispatcher.queueing.fair_queue import service_tokens
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.workers.placed_requests import StrandedWork
from simulation.prefix_cache import hash_prefixes
from simulation.request import SimulatedRequest
from streams.messages import Heartbeat, LedgerRecord, Pressure

OnEnded = Callable[[SimulatedRequest, str], None]


class SimulatedLeader:
    """Queues requests and publishes them to one pool's WORK.

    `ended` is called for requests that end without a worker, `send_pressure` with each report.
    """

    def __init__(
        self,
        clock: VirtualClock,
        delays: Delays,
        work: WorkStream,
        weights: Mapping[str, float],
        send_pressure: Callable[[Pressure], None],
        ended: OnEnded,
    ) -> None:
        self.state = ModelState("sim")
        self._clock, self._delays, self._work = clock, delays, work
        self._weights, self._send_pressure, self._ended = weights, send_pressure, ended
        self._seqs = itertools.count(1)
        self._requests: dict[str, SimulatedRequest] = {}
        self._dispatching = 0

    def start(self) -> None:
        """Begin to tick, every `Delays.pressure` seconds."""
        self._clock.call_every(self._delays.pressure, self._tick)

    def enqueue(self, request: SimulatedRequest) -> None:
        """Queue a request that has come in."""
        self._requests[request.request_id] = request
        if (weight := self._weights.get(request.spec.tenant)) is not None:
            self.state.queue.set_weight(request.spec.tenant, weight)
        self.state.queue.enqueue(_queued(request, next(self._seqs)), self._clock.now)
        self._dispatch()

    def receive_heartbeat(self, beat: Heartbeat) -> None:
        """Take in a worker's heartbeat, and dispatch what has room now."""
        self.state.apply_heartbeat(beat, self._clock.now)
        self._dispatch()

    def settle(self, request: SimulatedRequest) -> None:
        """Take in the ledger record of a request that a worker has ended."""
        self._requests.pop(request.request_id, None)
        service = service_tokens(request.spec.prompt_tokens, request.generated)
        self.state.learn_duration(_record(request))
        self.state.settle(request.request_id, service, self._clock.now)
        self._dispatch()

    def _tick(self) -> None:
        for item in self.state.queue.pop_expired(self._clock.now):
            self._end(item)
        self.state.tick(self._clock.now)
        for stranded in self.state.find_stranded(self._clock.now):
            self._requeue_stranded(stranded)
        self._send_pressure(self.state.build_pressure())
        self._dispatch()

    def _requeue_stranded(self, stranded: StrandedWork) -> None:
        for _ in range(stranded.count):
            if placed := self._work.pop_placed(stranded.worker):
                request, previous_seq = placed
                self.state.mark_requeued(
                    request.request_id, previous_seq, self._work.store(request)
                )

    def _end(self, item: QueuedRequest) -> None:
        self._ended(self._requests.pop(item.request_id), "deadline_exceeded")

    def _dispatch(self) -> None:
        while self._dispatching < MAX_CONCURRENT_DISPATCHES and (item := self._select_next()):
            self._dispatching += 1
            work_priority = self.state.reserve(item, VERSION, self._clock.now)
            self._requests[item.request_id].work_priority = work_priority
            self._clock.call_later(self._delays.fetch + self._delays.store, self._publishing(item))

    def _select_next(self) -> QueuedRequest | None:
        while found := self.state.select_next(lambda item: VERSION, self._clock.now):
            item, _ = found
            if not self.state.estimator.will_miss_deadline(item, self._clock.now):
                return item
            self.state.queue.remove(item.request_id)
            self._end(item)
        return None

    def _publishing(self, item: QueuedRequest) -> Callable[[], None]:
        return lambda: self._publish(item)

    def _publish(self, item: QueuedRequest) -> None:
        self._dispatching -= 1
        if item.deadline / 1000 < self._clock.now:
            self.state.release(item.request_id)
            self._end(item)
        else:
            request = self._requests[item.request_id]
            placement = self.state.place(item.request_id, hash_prefixes(request.spec.blocks), "")
            seq = self._work.store(request, placement.worker)
            if request.estimated_wait is not None:
                self.state.estimator.service_rate.record_wait(
                    request.estimated_wait, self._clock.now - request.spec.at
                )
            self.state.mark_published(item.request_id, seq, duplicate=False)
        self._dispatch()


def _record(request: SimulatedRequest) -> LedgerRecord:
    """The ledger record that a worker writes for a request that has ended."""
    return LedgerRecord(
        request_id=request.request_id,
        tenant=request.spec.tenant,
        model="sim",
        version=VERSION,
        outcome=request.code or "stop",
        prompt_tokens=request.spec.prompt_tokens,
        completion_tokens=request.generated,
        attempts=1,
        worker=request.worker,
        accepted=int(request.spec.at * 1000),
        finished=round(1000 * (request.ended or 0.0)),
        first=round(1000 * (request.first or 0.0)),
    )


def _queued(request: SimulatedRequest, seq: int) -> QueuedRequest:
    spec = request.spec
    return QueuedRequest(
        request_id=request.request_id,
        tenant=spec.tenant,
        priority=spec.priority,
        prompt_tokens=spec.prompt_tokens,
        cost=spec.cost,
        accepted=int(spec.at * 1000),
        deadline=int(request.deadline * 1000),
        route="",
        version="",
        seq=seq,
        reply="",
    )
