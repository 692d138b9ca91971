"""Compares the requests that a leader believes to be queued with what the broker has in REQUESTS.

Messages that were missed and acknowledgements that got lost leave a trace in the broker. A
suspicion counts when it still holds at the next check.
"""

import time
from datetime import datetime
from typing import Protocol

import structlog
from nats.js.api import ConsumerInfo

from dispatcher.dispatching.dispatch_loop import DispatchLoop
from dispatcher.dispatching.metrics import observe_stuck_consumer
from dispatcher.dispatching.model_state import ModelState
from dispatcher.dispatching.terminals import TerminalWriter
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.reconcile.in_flight_requests import WORK_LOST
from dispatcher.reconcile.stuck_consumer_detector import StuckConsumerDetector
from streams import subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable

log = structlog.get_logger()

_LOST_MESSAGE = "the request was removed from the broker before a worker had begun it"


class IndexLost(BrokerUnavailable):
    """The leader's consumer of queued requests can no longer be used, so a new leader must begin.

    The consumer is gone (another leader leads, or an operator removed it), is stuck, or does not
    deliver a request that the broker has.
    """


class _RequestHolder(Protocol):
    """An object that holds requests which are not acknowledged in REQUESTS."""

    @property
    def oldest(self) -> QueuedRequest | None: ...

    def __len__(self) -> int: ...


class QueuedReconciler:
    """Compares a leader's queued requests with the messages of the stream REQUESTS.

    The leader calls `remember_stream` once when it starts, then `reconcile` regularly.
    """

    def __init__(
        self,
        broker: Broker,
        state: ModelState,
        terminals: TerminalWriter,
        dispatch_loop: DispatchLoop,
    ) -> None:
        self._broker, self._state = broker, state
        self._terminals, self._dispatch_loop = terminals, dispatch_loop
        self._created: datetime | None = None  # when REQUESTS was made
        self._loss_signature: tuple[int, ...] | None = None
        self._resurrected = 0
        self._stuck = StuckConsumerDetector()

    async def remember_stream(self) -> None:
        """Remember when REQUESTS was created, to recognise another one that is made in its place.

        To be called once, before the first `reconcile`. Raises nats-py's `NotFoundError` if there
        is no REQUESTS, `BrokerUnavailable` if no answer comes.
        """
        self._created = (await declaration.stream_info(self._broker, topology.REQUESTS)).created

    async def reconcile(self, consumer: str) -> None:
        """Have all queued requests delivered again if a delivery or an acknowledgement was lost.

        `consumer` is the name of the consumer by which this leader reads the stream REQUESTS (index
        consumer). It is reset only if two calls in a row find the same loss. Raises `IndexLost` if
        the consumer is gone, stuck, or past a request that the broker has again. If REQUESTS itself
        was replaced, `IndexLost` is raised only when the requests that are gone with it were ended,
        which can take several calls; only this leader knows of them. Raises nats-py's
        `NotFoundError` while there is no REQUESTS, `BrokerUnavailable` if no answer comes.
        """
        info = await self._get_consumer(consumer)
        if info is None:
            if await self._end_lost():
                return
            raise IndexLost(f"no consumer {consumer}")
        self._dispatch_loop.vanished.clear()
        self._check_index(info)
        await self._check_resurrected(info)
        signature = await self._find_loss_signature(info)
        if signature and signature == self._loss_signature:
            log.warning("index_repaired", model=self._state.model, un_acked=info.num_ack_pending)
            await self._broker.js.reset_consumer(topology.REQUESTS, consumer)
        self._loss_signature = signature

    async def _end_lost(self) -> bool:
        """End the requests that were in a REQUESTS of before; True while that is being written.

        Raises nats-py's `NotFoundError` while there is no REQUESTS, and `BrokerUnavailable`.
        """
        stream = await declaration.stream_info(self._broker, topology.REQUESTS)
        if stream.created == self._created:
            return False
        lost = self._state.queue.pop_before(stream.state.first_seq)
        for item in lost + self._dispatch_loop.vanished:
            self._terminals.end_request(item, WORK_LOST, _LOST_MESSAGE)
        self._dispatch_loop.vanished.clear()
        return bool(len(self._terminals) or len(self._dispatch_loop))

    async def _get_consumer(self, name: str) -> ConsumerInfo | None:
        return await declaration.consumer_info(self._broker, topology.REQUESTS, name)

    def _check_index(self, info: ConsumerInfo) -> None:
        """Raises `IndexLost` if the index consumer is stuck: a new leader makes another one.

        The pull on the index takes whatever there is, so that everything pending is due.
        """
        delivered, due = declaration.count_deliveries(info), bool(info.num_pending)
        if self._stuck.is_stuck(info.name, delivered, time.monotonic(), due=due):
            observe_stuck_consumer(self._state.model, topology.REQUESTS)
            raise IndexLost(f"the consumer {info.name} delivers nothing")

    async def _check_resurrected(self, info: ConsumerInfo) -> None:
        """Raises `IndexLost` for a request that is there again, which this index never delivers.

        A broker that could not write has forgotten, by its next start, that the request was
        removed.
        """
        oldest = await self._find_oldest(1)
        resurrected = oldest if info.ack_floor and oldest <= info.ack_floor.stream_seq else 0
        if resurrected and resurrected == self._resurrected:
            raise IndexLost(
                f"the consumer {info.name} is past request {resurrected}, which is there"
            )
        self._resurrected = resurrected

    async def _find_oldest(self, seq: int) -> int:
        """The sequence of the model's oldest request from `seq` on; 0 if there is none."""
        pattern = subjects.requests_of(self._state.model)
        found = await self._broker.read(topology.REQUESTS, {"next_by_subj": pattern, "seq": seq})
        return found[0].seq if found else 0

    async def _find_loss_signature(self, info: ConsumerInfo) -> tuple[int, ...] | None:
        """Numbers that stay the same as long as a delivery or an ack is lost; None if none is.

        Either the oldest un-acked request is older than all that are known, or nothing moves and
        the broker waits for more acknowledgements than are known.
        """
        if not info.num_ack_pending or not info.ack_floor or not info.delivered:
            return None
        floor, delivered = info.ack_floor.stream_seq, info.delivered.stream_seq
        holders: tuple[_RequestHolder, ...] = (
            self._state.queue,
            self._terminals,
            self._dispatch_loop,
        )
        oldest = min(
            (holder.oldest.seq for holder in holders if holder.oldest), default=delivered + 1
        )
        if floor + 1 < oldest:
            found = await self._find_oldest(floor + 1)
            if 0 < found < oldest:
                return (found,)
        if info.num_ack_pending > sum(len(holder) for holder in holders):
            return info.num_ack_pending, floor, info.delivered.consumer_seq
        return None
