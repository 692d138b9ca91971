"""The leader of a model on the virtual clock: the real `Books`, driven as `dispatcher/` drives it.

What `dispatcher/leader.py` and `dispatcher/sending.py` do, without their broker. Every call of the
scheduler is in this file.
"""

import itertools
from collections.abc import Callable, Mapping

from bench.simulation.clock import Clock
from bench.simulation.delays import Delays
from bench.simulation.pool import Pool
from bench.simulation.prefixes import marks_of
from bench.simulation.request import Fate
from bench.simulation.worker import VERSION
from dispatcher.books import Books
from dispatcher.fair_queue import service
from dispatcher.lines import Queued
from dispatcher.placements import Stray
from dispatcher.sending import AT_ONCE
from streams.messages import Beat, LedgerRecord, Pressure

End = Callable[[Fate, str], None]


class Leader:
    """Queues requests and sends them to one pool; `ended` is told of those that never go there."""

    def __init__(
        self,
        clock: Clock,
        delays: Delays,
        pool: Pool,
        weights: Mapping[str, float],
        tell: Callable[[Pressure], None],
        ended: End,
    ) -> None:
        self.books = Books("sim")
        self._clock, self._delays, self._pool = clock, delays, pool
        self._weights, self._tell, self._ended = weights, tell, ended
        self._seqs = itertools.count(1)
        self._fates: dict[str, Fate] = {}
        self._under_way = 0

    def start(self) -> None:
        self._clock.every(self._delays.tell, self._tick)

    def index(self, fate: Fate) -> None:
        """A request has come in."""
        self._fates[fate.request_id] = fate
        if (weight := self._weights.get(fate.asked.tenant)) is not None:
            self.books.queue.set_weight(fate.asked.tenant, weight)
        self.books.queue.push(_queued(fate, next(self._seqs)), self._clock.now)
        self._send()

    def hear(self, beat: Beat) -> None:
        self.books.beat(beat, self._clock.now)
        self._send()

    def settle(self, fate: Fate) -> None:
        """The ledger's record of a request that a worker has ended."""
        self._fates.pop(fate.request_id, None)
        spent = service(fate.asked.prompt_tokens, fate.generated)
        self.books.learn(_record(fate))
        self.books.settle(fate.request_id, spent, self._clock.now)
        self._send()

    def _tick(self) -> None:
        for item in self.books.queue.expired(self._clock.now):
            self._end(item)
        self.books.tick(self._clock.now)
        for stray in self.books.strays(self._clock.now):
            self._take_back(stray)
        self._tell(self.books.pressure())
        self._send()

    def _take_back(self, stray: Stray) -> None:
        for _ in range(stray.count):
            if taken := self._pool.take_back(stray.worker):
                fate, before = taken
                self.books.returned(fate.request_id, before, self._pool.put(fate))

    def _end(self, item: Queued) -> None:
        self._ended(self._fates.pop(item.request_id), "deadline_exceeded")

    def _send(self) -> None:
        while self._under_way < AT_ONCE and (item := self._next()):
            self._under_way += 1
            lane = self.books.take(item, VERSION, self._clock.now)
            self._fates[item.request_id].lane = lane
            self._clock.after(self._delays.fetch + self._delays.store, self._storing(item))

    def _next(self) -> Queued | None:
        while found := self.books.next(lambda item: VERSION, self._clock.now):
            item, _ = found
            if not self.books.outlook.too_late(item, self._clock.now):
                return item
            self.books.queue.remove(item.request_id)
            self._end(item)
        return None

    def _storing(self, item: Queued) -> Callable[[], None]:
        return lambda: self._store(item)

    def _store(self, item: Queued) -> None:
        self._under_way -= 1
        if item.deadline / 1000 < self._clock.now:
            self.books.not_sent(item.request_id)
            self._end(item)
        else:
            fate = self._fates[item.request_id]
            placed = self.books.place(item.request_id, marks_of(fate.asked.blocks), "")
            seq = self._pool.put(fate, placed.worker)
            if fate.told_wait is not None:
                self.books.outlook.pace.waited(fate.told_wait, self._clock.now - fate.asked.at)
            self.books.sent(item.request_id, seq, duplicate=False)
        self._send()


def _record(fate: Fate) -> LedgerRecord:
    """What a worker writes of a request that has ended."""
    return LedgerRecord(
        request_id=fate.request_id,
        tenant=fate.asked.tenant,
        model="sim",
        version=VERSION,
        outcome=fate.code or "stop",
        prompt_tokens=fate.asked.prompt_tokens,
        completion_tokens=fate.generated,
        attempts=1,
        worker=fate.worker,
        accepted=int(fate.asked.at * 1000),
        finished=round(1000 * (fate.ended or 0.0)),
        first=round(1000 * (fate.first or 0.0)),
    )


def _queued(fate: Fate, seq: int) -> Queued:
    asked = fate.asked
    return Queued(
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
