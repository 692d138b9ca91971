"""Compare what a leader believes to be queued with what the broker holds in REQUESTS.

Messages that were missed and acknowledgements that got lost leave a trace in the broker. A
suspicion counts when it still holds at the next look.
"""

import time
from typing import Protocol

import structlog
from nats.js.api import ConsumerInfo

from dispatcher.dispatching.dispatch_loop import DispatchLoop
from dispatcher.dispatching.metrics import observe_stuck_consumer
from dispatcher.dispatching.model_state import ModelState
from dispatcher.dispatching.terminals import TerminalWriter
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.reconcile.stuck_consumers import StuckConsumers
from streams import subjects, topology
from streams.broker import declaration
from streams.broker.connection import Broker
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class IndexLost(BrokerUnavailable):
    """The index consumer is gone, or dead: somebody else leads, or an operator was at it."""


class _RequestHolder(Protocol):
    """Who holds requests that are un-acked in REQUESTS."""

    @property
    def oldest(self) -> QueuedRequest | None: ...

    def __len__(self) -> int: ...


class QueuedReconciler:
    """The regular look at REQUESTS of one model."""

    def __init__(
        self, broker: Broker, books: ModelState, endings: TerminalWriter, sending: DispatchLoop
    ) -> None:
        self._broker, self._state = broker, books
        self._terminals, self._dispatch_loop = endings, sending
        self._loss_signature: tuple[int, ...] | None = None
        self._resurrected = 0
        self._stuck = StuckConsumers()

    async def reconcile(self, consumer: str) -> None:
        """Have everything delivered again if something was delivered that is not known here."""
        info = await self._get_consumer(consumer)
        if info is None:
            raise IndexLost(f"no consumer {consumer}")
        self._check_index(info)
        await self._check_resurrected(info)
        sign = await self._find_loss_signature(info)
        if sign and sign == self._loss_signature:
            log.warning("index_repaired", model=self._state.model, un_acked=info.num_ack_pending)
            await self._broker.js.reset_consumer(topology.REQUESTS, consumer)
        self._loss_signature = sign

    async def _get_consumer(self, name: str) -> ConsumerInfo | None:
        return await declaration.consumer_info(self._broker, topology.REQUESTS, name)

    def _check_index(self, info: ConsumerInfo) -> None:
        """The pull on the index takes whatever there is: a new leader makes another consumer."""
        delivered, due = declaration.count_deliveries(info), bool(info.num_pending)
        if self._stuck.is_stuck(info.name, delivered, time.monotonic(), due=due):
            observe_stuck_consumer(self._state.model, topology.REQUESTS)
            raise IndexLost(f"the consumer {info.name} delivers nothing")

    async def _check_resurrected(self, info: ConsumerInfo) -> None:
        """Raises `IndexLost` for a request that is there again, which this index never delivers.

        A broker that could not write has forgotten, by its next start, that it was removed.
        """
        oldest = await self._find_oldest(1)
        undead = oldest if info.ack_floor and oldest <= info.ack_floor.stream_seq else 0
        if undead and undead == self._resurrected:
            raise IndexLost(f"the consumer {info.name} has done with {undead}, which is there")
        self._resurrected = undead

    async def _find_oldest(self, seq: int) -> int:
        """The oldest request of the model from a sequence on; 0 if there is none."""
        pattern = subjects.requests_of(self._state.model)
        found = await self._broker.read(topology.REQUESTS, {"next_by_subj": pattern, "seq": seq})
        return found[0].seq if found else 0

    async def _find_loss_signature(self, info: ConsumerInfo) -> tuple[int, ...] | None:
        """What stays the same as long as a delivery or an acknowledgement is lost, or None.

        Either the oldest un-acked request is older than all that are known, or nothing moves and
        the broker waits for more acknowledgements than are known.
        """
        if not info.num_ack_pending or not info.ack_floor or not info.delivered:
            return None
        floor, delivered = info.ack_floor.stream_seq, info.delivered.stream_seq
        known: tuple[_RequestHolder, ...] = (
            self._state.queue,
            self._terminals,
            self._dispatch_loop,
        )
        oldest = min((held.oldest.seq for held in known if held.oldest), default=delivered + 1)
        if floor + 1 < oldest:
            found = await self._find_oldest(floor + 1)
            if 0 < found < oldest:
                return (found,)
        if info.num_ack_pending > sum(len(held) for held in known):
            return info.num_ack_pending, floor, info.delivered.consumer_seq
        return None
