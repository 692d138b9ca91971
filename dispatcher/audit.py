"""Compare what a leader believes to be queued with what the broker holds in REQUESTS.

Messages that were missed and acknowledgements that got lost leave a trace in the broker. A
suspicion counts when it still holds at the next look.
"""

import time
from typing import Protocol

import structlog
from nats.js.api import ConsumerInfo

from dispatcher.books import Books
from dispatcher.ending import Endings
from dispatcher.lines import Queued
from dispatcher.metrics import observe_stall
from dispatcher.sending import Sending
from dispatcher.stalls import Stalls
from streams import declaration, subjects, topology
from streams.connection import Broker
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class IndexLost(BrokerUnavailable):
    """The index consumer is gone, or dead: somebody else leads, or an operator was at it."""


class _Holder(Protocol):
    """Who holds requests that are un-acked in REQUESTS."""

    @property
    def oldest(self) -> Queued | None: ...

    def __len__(self) -> int: ...


class Audit:
    """The regular look at REQUESTS of one model."""

    def __init__(self, broker: Broker, books: Books, endings: Endings, sending: Sending) -> None:
        self._broker, self._books = broker, books
        self._endings, self._sending = endings, sending
        self._sign: tuple[int, ...] | None = None
        self._undead = 0
        self._stalls = Stalls()

    async def look(self, consumer: str) -> None:
        """Have everything delivered again if something was delivered that is not known here."""
        info = await self._consumer(consumer)
        if info is None:
            raise IndexLost(f"no consumer {consumer}")
        self._look_at_index(info)
        await self._look_for_undead(info)
        sign = await self._sign_of_loss(info)
        if sign and sign == self._sign:
            log.warning("index_repaired", model=self._books.model, un_acked=info.num_ack_pending)
            await self._broker.js.reset_consumer(topology.REQUESTS, consumer)
        self._sign = sign

    async def _consumer(self, name: str) -> ConsumerInfo | None:
        return await declaration.consumer_info(self._broker, topology.REQUESTS, name)

    def _look_at_index(self, info: ConsumerInfo) -> None:
        """The pull on the index takes whatever there is: a new leader makes another consumer."""
        delivered, due = declaration.deliveries(info), bool(info.num_pending)
        if self._stalls.is_stalled(info.name, delivered, time.monotonic(), due=due):
            observe_stall(self._books.model, topology.REQUESTS)
            raise IndexLost(f"the consumer {info.name} delivers nothing")

    async def _look_for_undead(self, info: ConsumerInfo) -> None:
        """Raises `IndexLost` for a request that is there again, which this index never delivers.

        A broker that could not write has forgotten, by its next start, that it was removed.
        """
        oldest = await self._oldest(1)
        undead = oldest if info.ack_floor and oldest <= info.ack_floor.stream_seq else 0
        if undead and undead == self._undead:
            raise IndexLost(f"the consumer {info.name} has done with {undead}, which is there")
        self._undead = undead

    async def _oldest(self, seq: int) -> int:
        """The oldest request of the model from a sequence on; 0 if there is none."""
        pattern = subjects.requests_of(self._books.model)
        found = await self._broker.read(topology.REQUESTS, {"next_by_subj": pattern, "seq": seq})
        return found[0].seq if found else 0

    async def _sign_of_loss(self, info: ConsumerInfo) -> tuple[int, ...] | None:
        """What stays the same as long as a delivery or an acknowledgement is lost, or None.

        Either the oldest un-acked request is older than all that are known, or nothing moves and
        the broker waits for more acknowledgements than are known.
        """
        if not info.num_ack_pending or not info.ack_floor or not info.delivered:
            return None
        floor, delivered = info.ack_floor.stream_seq, info.delivered.stream_seq
        known: tuple[_Holder, ...] = (self._books.queue, self._endings, self._sending)
        oldest = min((held.oldest.seq for held in known if held.oldest), default=delivered + 1)
        if floor + 1 < oldest:
            found = await self._oldest(floor + 1)
            if 0 < found < oldest:
                return (found,)
        if info.num_ack_pending > sum(len(held) for held in known):
            return info.num_ack_pending, floor, info.delivered.consumer_seq
        return None
