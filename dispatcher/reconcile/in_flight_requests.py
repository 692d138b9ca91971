"""Compares the requests that a leader believes to be in flight with what the broker has in WORK.

To read WORK is to read its payloads, so it is read only where something stays in doubt: work that
no worker reports and that does not wait by the broker's numbers, or more work than is known. A
suspicion counts when it still holds at the next check.
"""

import time
from collections import defaultdict
from collections.abc import Mapping

import structlog
from nats.js.api import ConsumerInfo

from dispatcher.dispatching.metrics import observe_ended, observe_stuck_consumer
from dispatcher.dispatching.model_state import ModelState
from dispatcher.dispatching.terminals import write_terminal
from dispatcher.reconcile import dead_letters
from dispatcher.reconcile.requeuer import parse_requeue_origin
from dispatcher.reconcile.stuck_consumer_detector import StuckConsumerDetector
from dispatcher.workers.placed_requests import InFlightRequest
from streams import subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, StoredMessage
from streams.headers import Envelope
from streams.records.dead_letters import parse_envelope
from streams.subjects import ANY, PoolKey

log = structlog.get_logger()
ConsumerInfos = dict[str, ConsumerInfo]  # by the consumer's name
StoredBySeq = dict[int, StoredMessage]  # by its sequence in WORK

REPORT_SECONDS = 2.0  # in which a worker reports ten thousand requests: others may be gone
UNKNOWN_CHECKS = 3  # in a row with more work than is known: work on its way makes a difference
WORK_LOST = "work_lost"
_MESSAGES = {
    WORK_LOST: "the work was removed from the broker before a worker had done it",
    dead_letters.DEADLINE_EXCEEDED: "the deadline has passed",
}


class InFlightReconciler:
    """Compares a leader's requests in flight with the messages of the stream WORK.

    A request in flight was dispatched and has not ended. The leader calls `reconcile` when it
    starts and then regularly; `shards` is the number of streams over which token logs are spread.
    """

    def __init__(self, broker: Broker, state: ModelState, shards: int) -> None:
        self._broker, self._state, self._shards = broker, state, shards
        self._unknown_checks = UNKNOWN_CHECKS - 1  # the first check reads what others sent
        self._doubts: set[int] = set()
        self._missing: set[int] = set()
        self._suspects: set[int] = set()
        self._stuck = StuckConsumerDetector()

    async def reconcile(self) -> None:
        """Make the leader's state match the stream WORK, and end what no worker will end.

        Messages that the leader does not know are adopted as requests in flight. A request whose
        message is gone is settled, and ended with an error unless it has ended already. Messages
        past their deadline, or without deliveries left, or that cannot be read, are removed, and
        their requests ended; stuck consumers are mended. A deadline counts once it is
        `GRACE_SECONDS` past, and the first call adopts at once. All else must be found at two or
        more calls in a row, since messages on their way look the same. Raises the broker's errors;
        the next call goes on.
        """
        sequences_by_subject = self._known_by_subject()
        infos = await self._get_consumers(sequences_by_subject)
        doubted = self._find_doubted(sequences_by_subject, infos)
        still_doubted, self._doubts = doubted & self._doubts, doubted
        suspicious = still_doubted | self._find_overdue()
        if suspicious or await self._has_unknown():
            await self._compare(suspicious, infos)
        fleet = self._state.fleet
        fleet.discard(fleet.pending_sequences - self._state.published.keys())
        for subject in sequences_by_subject:
            info = infos.get(topology.consumer_name_for(subject))
            if info and subjects.placement(subject) == ANY:
                await self._check_pool(subjects.parse_work(subject), info)

    def _known_by_subject(self) -> dict[str, list[int]]:
        """The sequences that are known to lie in WORK, by subject."""
        by_lane = defaultdict(list)
        for seq, flight in self._state.published.items():
            by_lane[flight.version, flight.work_priority, flight.worker].append(seq)
        model = self._state.model
        return {
            subjects.work(PoolKey(model, v, priority), w): s
            for (v, priority, w), s in by_lane.items()
        }

    async def _get_consumers(self, sequences_by_subject: Mapping[str, list[int]]) -> ConsumerInfos:
        """The consumers of these subjects, as far as they exist."""
        names = {topology.consumer_name_for(subject) for subject in sequences_by_subject}
        return {n: info for n in names if (info := await self._get_consumer(n))}

    async def _get_consumer(self, name: str) -> ConsumerInfo | None:
        return await declaration.consumer_info(self._broker, topology.WORK, name)

    def _find_doubted(
        self, sequences_by_subject: Mapping[str, list[int]], infos: ConsumerInfos
    ) -> set[int]:
        """Work that may be gone: no worker reports it, and it does not wait to be delivered.

        It waits if its consumer has as many to deliver as are known behind what it has delivered.
        Work that has just been pulled is doubted until its worker's next heartbeat.
        """
        by_consumer = defaultdict(set)
        for subject, known in sequences_by_subject.items():
            by_consumer[topology.consumer_name_for(subject)].update(known)
        waiting = [
            _waiting_sequences(known, infos.get(name)) for name, known in by_consumer.items()
        ]
        unreported_since = time.monotonic() - REPORT_SECONDS
        doubted = {
            s
            for s, flight in self._state.published.items()
            if flight.reported_at < unreported_since
        }
        return doubted.difference(*waiting)

    def _find_overdue(self) -> set[int]:
        """Work whose deadline has long passed, whether a worker has it or not."""
        now, published = self._broker.clock.now(), self._state.published
        return {
            s for s, flight in published.items() if dead_letters.is_overdue(flight.deadline, now)
        }

    async def _has_unknown(self) -> bool:
        """True if WORK has held more than is known for `UNKNOWN_CHECKS` checks in a row."""
        pattern = subjects.work_of(self._state.model)
        info = await declaration.stream_info(self._broker, topology.WORK, pattern)
        counts = info.state.subjects or {}
        held = sum(count for subject, count in counts.items() if subjects.is_work(subject))
        self._unknown_checks = self._unknown_checks + 1 if held > len(self._state.published) else 0
        return self._unknown_checks >= UNKNOWN_CHECKS

    async def _compare(self, suspicious: set[int], infos: ConsumerInfos) -> None:
        """Read WORK and repair all differences."""
        self._unknown_checks = 0
        held = await self._read_work()
        await self._finish_requeues(held)
        published = self._state.published
        for seq in published.keys() & held.keys():
            name = published[seq].envelope.request_id
            self._state.correct_placement(name, seq, subjects.placement(held[seq].subject))
        self._adopt_unknown([message for seq, message in held.items() if seq not in published])
        await self._end_missing(suspicious - held.keys())
        await self._end_undeliverable(held, infos)

    async def _read_work(self) -> StoredBySeq:
        pattern, held = subjects.work_of(self._state.model), {}
        for message in await self._broker.read_subject(topology.WORK, pattern):
            if subjects.is_work(message.subject):
                held[message.seq] = message
            else:  # no worker pulls it, and it delays nothing
                log.error("work_unreadable", subject=message.subject, seq=message.seq)
        return held

    async def _finish_requeues(self, held: StoredBySeq) -> None:
        """Finish an earlier leader's requeues: remove work where it was before it was moved."""
        for message in list(held.values()):
            origin = parse_requeue_origin(message.headers)
            if origin in held:
                del held[origin]
                await self._broker.remove(topology.WORK, origin)
            if flight := self._state.published.get(origin or 0):
                self._state.mark_requeued(flight.envelope.request_id, flight.seq, message.seq)

    def _adopt_unknown(self, unknown: list[StoredMessage]) -> None:
        """Adopt work that an earlier leader has published."""
        for message in unknown:
            if envelope := parse_envelope(message.headers):
                pool = subjects.parse_work(message.subject)
                placement = subjects.placement(message.subject)
                self._state.adopt(envelope, pool, message.seq, placement)

    async def _end_missing(self, missing: set[int]) -> None:
        """Settle work that is not in WORK any more, and end it if it has not ended.

        Brokers may have lost the log of a request that has ended: a worker that is asked for it at
        the first check has put it back by the second.
        """
        for seq in missing:
            if flight := self._state.published.get(seq):
                if seq not in self._missing:
                    await self._request_log(flight.envelope)
                elif await self._broker.get(topology.WORK, seq) is None:
                    await self._end_lost(flight)
        self._missing = missing

    async def _request_log(self, envelope: Envelope) -> None:
        """Ask workers to write the log of a request again that they have ended."""
        await self._broker.request(subjects.find(envelope.tenant, envelope.request_id))

    async def _end_lost(self, flight: InFlightRequest) -> None:
        """End a request whose work was removed; only if nobody has ended it."""
        envelope, model = flight.envelope, self._state.model
        late = envelope.deadline / 1000 < self._broker.clock.now()
        outcome = dead_letters.DEADLINE_EXCEEDED if late else WORK_LOST
        if await write_terminal(
            self._broker, envelope, model, outcome, _MESSAGES[outcome], self._shards
        ):
            log.error("work_lost", request_id=envelope.request_id, outcome=outcome)
            observe_ended(model, outcome)
        self._state.settle_missing(envelope.request_id, flight.seq, time.monotonic())

    async def _end_undeliverable(self, held: StoredBySeq, infos: ConsumerInfos) -> None:
        """End work that is overdue, or that was used up or unreadable at two checks in a row."""
        stuck = _stuck_sequences(held, infos) | _unreadable_sequences(held)
        for seq in (self._find_overdue() | (stuck & self._suspects)) & held.keys():
            await dead_letters.end_undeliverable(self._broker, held[seq], self._shards)
        self._suspects = stuck

    async def _check_pool(self, pool: PoolKey, info: ConsumerInfo) -> None:
        """Mend a pool's consumer that delivers nothing though its workers have room."""
        delivered = declaration.count_deliveries(info)
        due = bool(info.num_pending) and self._state.fleet.has_reported_room(
            pool.version, pool.priority
        )
        if not self._stuck.is_stuck(info.name, delivered, time.monotonic(), due=due):
            return
        observe_stuck_consumer(self._state.model, topology.WORK)
        paused, js = bool(info.paused), self._broker.js
        log.error("consumer_stuck", consumer=info.name, waiting=info.num_pending, paused=paused)
        if paused:
            await js.resume_consumer(topology.WORK, info.name)
        else:  # its workers make it anew and ignore the redelivery of what they run
            await js.delete_consumer(topology.WORK, info.name)


def _waiting_sequences(sequences: set[int], info: ConsumerInfo | None) -> set[int]:
    """Those of the sequences that wait to be delivered, if the broker's numbers cover all."""
    if info is None:
        return set()
    delivered = info.delivered.stream_seq if info.delivered else 0
    behind = {seq for seq in sequences if seq > delivered}
    return behind if len(behind) <= (info.num_pending or 0) else set()


def _stuck_sequences(held: StoredBySeq, infos: ConsumerInfos) -> set[int]:
    """Work that was delivered and that its consumer does not wait for any more: used up.

    The broker keeps such messages; a worker's acknowledgement would have removed them.
    """
    settled = {name: _settled_up_to(info) for name, info in infos.items()}
    consumers = {seq: topology.consumer_name_for(message.subject) for seq, message in held.items()}
    return {seq for seq, name in consumers.items() if seq <= settled.get(name, 0)}


def _unreadable_sequences(held: StoredBySeq) -> set[int]:
    """Work whose headers cannot be read: no worker can do it.

    A worker would remove it itself, but that of a worker's own lane may be gone.
    """
    return {seq for seq, message in held.items() if parse_envelope(message.headers) is None}


def _settled_up_to(info: ConsumerInfo) -> int:
    """The highest sequence up to which the consumer waits for no acknowledgement."""
    floor = info.ack_floor if info.num_ack_pending else info.delivered
    return floor.stream_seq if floor else 0
