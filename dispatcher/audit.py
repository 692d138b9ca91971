"""Compare what a leader believes with what the broker holds, and put right what differs.

Messages that were missed, acknowledgements that got lost, workers that died without a word: each
leaves a trace in the broker. A suspicion counts when it still holds at the next look.
"""

import time
from typing import Protocol

import structlog
from nats.js.api import ConsumerInfo
from nats.js.errors import NotFoundError

from dispatcher import dead_letters
from dispatcher.books import Books
from dispatcher.ending import Endings
from dispatcher.lines import Queued
from dispatcher.metrics import observe_stall
from dispatcher.recall import moved_from
from dispatcher.sending import Sending
from dispatcher.stalls import Stalls
from streams import subjects, topology
from streams.connection import Broker, StoredMessage
from streams.dead_letters import envelope_of
from streams.errors import BrokerUnavailable
from streams.subjects import Pool

log = structlog.get_logger()
Infos = dict[str, ConsumerInfo]  # by the consumer's name


class IndexLost(BrokerUnavailable):
    """The index consumer is gone, or dead: somebody else leads, or an operator was at it."""


class _Holder(Protocol):
    """Who holds requests that are un-acked in REQUESTS."""

    @property
    def oldest(self) -> Queued | None: ...

    def __len__(self) -> int: ...


class Audit:
    """The regular look at REQUESTS and WORK of one model."""

    def __init__(
        self, broker: Broker, books: Books, endings: Endings, sending: Sending, shards: int
    ) -> None:
        self._broker, self._books, self._shards = broker, books, shards
        self._endings, self._sending = endings, sending
        self._sign: tuple[int, ...] | None = None
        self._undead = 0
        self._suspects: set[int] = set()
        self._stalls = Stalls()

    async def requests(self, consumer: str) -> None:
        """Have everything delivered again if something was delivered that is not known here."""
        info = await self._consumer(topology.REQUESTS, consumer)
        if info is None:
            raise IndexLost(f"no consumer {consumer}")
        self._look_at_index(info)
        await self._look_for_undead(info)
        sign = await self._sign_of_loss(info)
        if sign and sign == self._sign:
            log.warning("index_repaired", model=self._books.model, un_acked=info.num_ack_pending)
            await self._broker.js.reset_consumer(topology.REQUESTS, consumer)
        self._sign = sign

    def _look_at_index(self, info: ConsumerInfo) -> None:
        """The pull on the index takes whatever there is: a new leader makes another consumer."""
        if self._is_stalled(info, due=bool(info.num_pending)):
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

    async def work(self) -> None:
        """What is in WORK is in flight and nothing else is; what cannot go on is buried."""
        sent = {flight.seq: name for name, flight in self._books.in_flight.items() if flight.seq}
        unpulled = self._books.fleet.unpulled
        pattern = subjects.work_of(self._books.model)
        held = {m.seq: m for m in await self._broker.read_subject(topology.WORK, pattern)}
        await self._finish_moves(held)
        for seq in sent.keys() - held.keys():
            self._books.gone(sent[seq], seq, time.monotonic())
        for seq in sent.keys() & held.keys():
            self._books.lies_for(sent[seq], seq, subjects.placement(held[seq].subject))
        self._books.fleet.left(unpulled - held.keys())
        self._adopt([message for seq, message in held.items() if seq not in sent])
        infos = await self._infos(held)
        await self._bury(held, infos)
        for pool in {subjects.parse_work(message.subject) for message in held.values()}:
            if info := infos.get(topology.consumer_of(subjects.work(pool))):
                await self._look_at_pool(pool, info)

    async def _finish_moves(self, held: dict[int, StoredMessage]) -> None:
        """Remove what a leader has stored for any worker and not acknowledged where it was."""
        for message in list(held.values()):
            before = moved_from(message.headers)
            if before in held:
                del held[before]
                await self._broker.remove(topology.WORK, before)

    def _adopt(self, unknown: list[StoredMessage]) -> None:
        for message in unknown:
            if envelope := envelope_of(message.headers):
                pool = subjects.parse_work(message.subject)
                placement = subjects.placement(message.subject)
                self._books.adopt(envelope, pool, message.seq, placement)

    async def _look_at_pool(self, pool: Pool, info: ConsumerInfo) -> None:
        """Workers have room and there is work for them: if it does not come, mend its consumer."""
        free = self._books.fleet.is_free(pool.version, pool.priority)
        if not self._is_stalled(info, due=free and bool(info.num_pending)):
            return
        observe_stall(self._books.model, topology.WORK)
        paused, js = bool(info.paused), self._broker.js
        log.error("work_not_delivered", consumer=info.name, waiting=info.num_pending, paused=paused)
        if paused:
            await js.resume_consumer(topology.WORK, info.name)
        else:  # its workers make it anew, which delivers again what they are at: they go on
            await js.delete_consumer(topology.WORK, info.name)

    def _is_stalled(self, info: ConsumerInfo, *, due: bool) -> bool:
        deliveries = info.delivered.consumer_seq if info.delivered else 0
        return self._stalls.is_stalled(info.name, deliveries, time.monotonic(), due=due)

    async def _bury(self, held: dict[int, StoredMessage], infos: Infos) -> None:
        stuck = _stuck(held, infos)
        now = self._broker.clock.now()
        flights = self._books.in_flight.values()
        late = {flight.seq for flight in flights if dead_letters.overdue(flight.deadline, now)}
        for seq in (late | (stuck & self._suspects)) & held.keys():
            await dead_letters.bury(self._broker, held[seq], self._shards)
        self._suspects = stuck

    async def _infos(self, held: dict[int, StoredMessage]) -> Infos:
        """The consumers of what is held, as far as they are there."""
        names = {topology.consumer_of(message.subject) for message in held.values()}
        return {n: info for n in names if (info := await self._consumer(topology.WORK, n))}

    async def _consumer(self, stream: str, name: str) -> ConsumerInfo | None:
        try:
            info: ConsumerInfo = await self._broker.js.consumer_info(stream, name)
        except NotFoundError:
            return None
        return info


def _stuck(held: dict[int, StoredMessage], infos: Infos) -> set[int]:
    """Work that was delivered and that its consumer does not wait for any more: used up.

    The broker keeps such messages; a worker's acknowledgement would have removed them.
    """
    settled = {name: _settled_up_to(info) for name, info in infos.items()}
    consumers = {seq: topology.consumer_of(message.subject) for seq, message in held.items()}
    return {seq for seq, name in consumers.items() if seq <= settled.get(name, 0)}


def _settled_up_to(info: ConsumerInfo) -> int:
    """The highest sequence below which the consumer waits for nothing."""
    floor = info.ack_floor if info.num_ack_pending else info.delivered
    return floor.stream_seq if floor else 0
