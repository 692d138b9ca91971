"""Compare what is in flight by a leader's books with what the broker holds in WORK.

To read WORK is to read its payloads, so that is done where something stays in doubt: work of which
no worker tells and which does not wait by the broker's numbers, or more of it than is known.
A suspicion counts when it still holds at the next look.
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
from dispatcher.reconcile.requeue import parse_requeue_origin
from dispatcher.reconcile.stuck_consumers import StuckConsumers
from dispatcher.workers.placements import InFlightRequest
from streams import subjects, topology
from streams.broker import declaration
from streams.broker.connection import Broker, StoredMessage
from streams.headers import Envelope
from streams.records.dead_letters import parse_envelope
from streams.subjects import ANY, PoolKey

log = structlog.get_logger()
ConsumerInfos = dict[str, ConsumerInfo]  # by the consumer's name
StoredBySeq = dict[int, StoredMessage]  # by its sequence in WORK

REPORT_SECONDS = 2.0  # a worker tells of ten thousand in that time: what is not told may be gone
UNKNOWN_CHECKS = 3  # in a row at which there is more than is known: what is on its way differs
LOST = "work_lost"
_WHY = {
    LOST: "the work was removed from the broker before a worker had done it",
    dead_letters.DEADLINE_EXCEEDED: "the deadline has passed",
}


class InFlightReconciler:
    """The regular look at WORK of one model."""

    def __init__(self, broker: Broker, books: ModelState, shards: int) -> None:
        self._broker, self._state, self._shards = broker, books, shards
        self._unknown_checks = UNKNOWN_CHECKS - 1  # the first look of all is at what others sent
        self._doubts: set[int] = set()
        self._missing: set[int] = set()
        self._suspects: set[int] = set()
        self._stuck = StuckConsumers()

    async def reconcile(self) -> None:
        """What is in WORK is in flight and nothing else is; what cannot go on is ended."""
        lanes = self._known_by_subject()
        infos = await self._get_consumers(lanes)
        doubted = self._find_doubted(lanes, infos)
        lasting, self._doubts = doubted & self._doubts, doubted
        suspicious = lasting | self._find_overdue()
        if suspicious or await self._has_unknown():
            await self._compare(suspicious, infos)
        fleet = self._state.fleet
        fleet.discard(fleet.pending_sequences - self._state.published.keys())
        for subject in lanes:
            info = infos.get(topology.consumer_name_for(subject))
            if info and subjects.placement(subject) == ANY:
                await self._check_pool(subjects.parse_work(subject), info)

    def _known_by_subject(self) -> dict[str, list[int]]:
        """The sequences that are known to lie in WORK, by subject."""
        lanes = defaultdict(list)
        for seq, flight in self._state.published.items():
            lanes[flight.version, flight.work_priority, flight.worker].append(seq)
        model = self._state.model
        return {subjects.work(PoolKey(model, v, lane), w): s for (v, lane, w), s in lanes.items()}

    async def _get_consumers(self, lanes: Mapping[str, list[int]]) -> ConsumerInfos:
        """The consumers of what is known, as far as they are there."""
        names = {topology.consumer_name_for(subject) for subject in lanes}
        return {n: info for n in names if (info := await self._get_consumer(n))}

    async def _get_consumer(self, name: str) -> ConsumerInfo | None:
        return await declaration.consumer_info(self._broker, topology.WORK, name)

    def _find_doubted(self, lanes: Mapping[str, list[int]], infos: ConsumerInfos) -> set[int]:
        """What may be gone: nobody tells of it and it does not wait.

        It waits if its consumer has as many to deliver as are known behind what it has delivered.
        What has just been pulled is doubted until its worker's next beat.
        """
        sequences = defaultdict(set)
        for subject, those in lanes.items():
            sequences[topology.consumer_name_for(subject)].update(those)
        waiting = [_waiting_sequences(those, infos.get(name)) for name, those in sequences.items()]
        silent = time.monotonic() - REPORT_SECONDS
        doubted = {s for s, flight in self._state.published.items() if flight.reported_at < silent}
        return doubted.difference(*waiting)

    def _find_overdue(self) -> set[int]:
        """What needs an end, wherever it is."""
        now, lying = self._broker.clock.now(), self._state.published
        return {s for s, flight in lying.items() if dead_letters.is_overdue(flight.deadline, now)}

    async def _has_unknown(self) -> bool:
        """Whether there has been more than is known for some time."""
        pattern = subjects.work_of(self._state.model)
        info = await declaration.stream_info(self._broker, topology.WORK, pattern)
        counts = info.state.subjects or {}
        held = sum(count for subject, count in counts.items() if subjects.is_work(subject))
        self._unknown_checks = self._unknown_checks + 1 if held > len(self._state.published) else 0
        return self._unknown_checks >= UNKNOWN_CHECKS

    async def _compare(self, suspicious: set[int], infos: ConsumerInfos) -> None:
        self._unknown_checks = 0
        held = await self._read_work()
        await self._finish_requeues(held)
        lying = self._state.published
        for seq in lying.keys() & held.keys():
            name = lying[seq].envelope.request_id
            self._state.correct_placement(name, seq, subjects.placement(held[seq].subject))
        self._adopt_unknown([message for seq, message in held.items() if seq not in lying])
        await self._end_missing(suspicious - held.keys())
        await self._end_undeliverable(held, infos)

    async def _read_work(self) -> StoredBySeq:
        pattern, held = subjects.work_of(self._state.model), {}
        for message in await self._broker.read_subject(topology.WORK, pattern):
            if subjects.is_work(message.subject):
                held[message.seq] = message
            else:  # no worker asks for it, and it is in nobody's way
                log.error("work_unreadable", subject=message.subject, seq=message.seq)
        return held

    async def _finish_requeues(self, held: StoredBySeq) -> None:
        """Remove what a leader has stored for any worker and not acknowledged where it was."""
        for message in list(held.values()):
            before = parse_requeue_origin(message.headers)
            if before in held:
                del held[before]
                await self._broker.remove(topology.WORK, before)
            if flight := self._state.published.get(before or 0):
                self._state.mark_requeued(flight.envelope.request_id, flight.seq, message.seq)

    def _adopt_unknown(self, unknown: list[StoredMessage]) -> None:
        for message in unknown:
            if envelope := parse_envelope(message.headers):
                pool = subjects.parse_work(message.subject)
                placement = subjects.placement(message.subject)
                self._state.adopt(envelope, pool, message.seq, placement)

    async def _end_missing(self, missing: set[int]) -> None:
        """What is in WORK no more has ended; if it has not, since it was removed, it ends here.

        Brokers may have lost the log of what has ended: a worker that is asked for it at the first
        look has put it back by the second.
        """
        for seq in missing:
            if flight := self._state.published.get(seq):
                if seq not in self._missing:
                    await self._request_log(flight.envelope)
                elif await self._broker.get(topology.WORK, seq) is None:
                    await self._end_lost(flight)
        self._missing = missing

    async def _request_log(self, envelope: Envelope) -> None:
        await self._broker.request(subjects.find(envelope.tenant, envelope.request_id))

    async def _end_lost(self, flight: InFlightRequest) -> None:
        envelope, model = flight.envelope, self._state.model
        late = envelope.deadline / 1000 < self._broker.clock.now()
        outcome = dead_letters.DEADLINE_EXCEEDED if late else LOST
        if await write_terminal(
            self._broker, envelope, model, outcome, _WHY[outcome], self._shards
        ):
            log.error("work_lost", request_id=envelope.request_id, outcome=outcome)
            observe_ended(model, outcome)
        self._state.settle_missing(envelope.request_id, flight.seq, time.monotonic())

    async def _end_undeliverable(self, held: StoredBySeq, infos: ConsumerInfos) -> None:
        stuck = _stuck_sequences(held, infos) | _unreadable_sequences(held)
        for seq in (self._find_overdue() | (stuck & self._suspects)) & held.keys():
            await dead_letters.end_undeliverable(self._broker, held[seq], self._shards)
        self._suspects = stuck

    async def _check_pool(self, pool: PoolKey, info: ConsumerInfo) -> None:
        """Workers have room and there is work for them: if it does not come, mend its consumer."""
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
        else:  # its workers make it anew, which delivers again what they are at: they go on
            await js.delete_consumer(topology.WORK, info.name)


def _waiting_sequences(sequences: set[int], info: ConsumerInfo | None) -> set[int]:
    """Of these what waits to be delivered, if by the broker's numbers all of it is there."""
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
    """What no worker that has it can do; that of a lane may be gone."""
    return {seq for seq, message in held.items() if parse_envelope(message.headers) is None}


def _settled_up_to(info: ConsumerInfo) -> int:
    """The highest sequence below which the consumer waits for nothing."""
    floor = info.ack_floor if info.num_ack_pending else info.delivered
    return floor.stream_seq if floor else 0
