"""The leader of a model on the virtual clock: the real `ModelState`, driven as `dispatcher/` drives it.

What `dispatcher/leader.py` and `dispatcher/dispatching/dispatch_loop.py` do, without their broker. Every call of the
scheduler is in this file.
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
from dispatcher.workers.placements import StrandedWork
from simulation.prefix_cache import hash_prefixes
from simulation.request import SimulatedRequest
from streams.messages import Heartbeat, LedgerRecord, Pressure

End = Callable[[SimulatedRequest, str], None]


class SimulatedLeader:
    """Queues requests and sends them to one pool; `ended` is told of those that never go there."""

    def __init__(
        self,
        clock: VirtualClock,
        delays: Delays,
        pool: WorkStream,
        weights: Mapping[str, float],
        tell: Callable[[Pressure], None],
        ended: End,
    ) -> None:
        self.state = ModelState("sim")
        self._clock, self._delays, self._pool = clock, delays, pool
        self._weights, self._tell, self._ended = weights, tell, ended
        self._seqs = itertools.count(1)
        self._fates: dict[str, SimulatedRequest] = {}
        self._dispatching = 0

    def start(self) -> None:
        self._clock.call_every(self._delays.tell, self._tick)

    def enqueue(self, fate: SimulatedRequest) -> None:
        """A request has come in."""
        self._fates[fate.request_id] = fate
        if (weight := self._weights.get(fate.spec.tenant)) is not None:
            self.state.queue.set_weight(fate.spec.tenant, weight)
        self.state.queue.enqueue(_queued(fate, next(self._seqs)), self._clock.now)
        self._dispatch()

    def receive_heartbeat(self, beat: Heartbeat) -> None:
        self.state.apply_heartbeat(beat, self._clock.now)
        self._dispatch()

    def settle(self, fate: SimulatedRequest) -> None:
        """The ledger's record of a request that a worker has ended."""
        self._fates.pop(fate.request_id, None)
        spent = service_tokens(fate.spec.prompt_tokens, fate.generated)
        self.state.learn_duration(_record(fate))
        self.state.settle(fate.request_id, spent, self._clock.now)
        self._dispatch()

    def _tick(self) -> None:
        for item in self.state.queue.pop_expired(self._clock.now):
            self._end(item)
        self.state.tick(self._clock.now)
        for stray in self.state.find_stranded(self._clock.now):
            self._requeue_stranded(stray)
        self._tell(self.state.build_pressure())
        self._dispatch()

    def _requeue_stranded(self, stray: StrandedWork) -> None:
        for _ in range(stray.count):
            if taken := self._pool.pop_placed(stray.worker):
                fate, before = taken
                self.state.mark_requeued(fate.request_id, before, self._pool.store(fate))

    def _end(self, item: QueuedRequest) -> None:
        self._ended(self._fates.pop(item.request_id), "deadline_exceeded")

    def _dispatch(self) -> None:
        while self._dispatching < MAX_CONCURRENT_DISPATCHES and (item := self._select_next()):
            self._dispatching += 1
            lane = self.state.reserve(item, VERSION, self._clock.now)
            self._fates[item.request_id].work_priority = lane
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
            fate = self._fates[item.request_id]
            placed = self.state.place(item.request_id, hash_prefixes(fate.spec.blocks), "")
            seq = self._pool.store(fate, placed.worker)
            if fate.estimated_wait is not None:
                self.state.estimator.service_rate.record_wait(
                    fate.estimated_wait, self._clock.now - fate.spec.at
                )
            self.state.mark_published(item.request_id, seq, duplicate=False)
        self._dispatch()


def _record(fate: SimulatedRequest) -> LedgerRecord:
    """What a worker writes of a request that has ended."""
    return LedgerRecord(
        request_id=fate.request_id,
        tenant=fate.spec.tenant,
        model="sim",
        version=VERSION,
        outcome=fate.code or "stop",
        prompt_tokens=fate.spec.prompt_tokens,
        completion_tokens=fate.generated,
        attempts=1,
        worker=fate.worker,
        accepted=int(fate.spec.at * 1000),
        finished=round(1000 * (fate.ended or 0.0)),
        first=round(1000 * (fate.first or 0.0)),
    )


def _queued(fate: SimulatedRequest, seq: int) -> QueuedRequest:
    asked = fate.spec
    return QueuedRequest(
        request_id=fate.request_id,
        tenant=asked.tenant,
        priority=asked.priority,
        prompt_tokens=asked.prompt_tokens,
        cost=asked.cost,
        accepted=int(asked.at * 1000),
        deadline=int(fate.deadline * 1000),
        route="",
        version="",
        seq=seq,
        reply="",
    )
