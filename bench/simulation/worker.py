"""A worker on the virtual clock: it pulls what its credit allows, runs it, and beats.

What `gpu_worker/pool/model_server.py` and `attempt.py` do, with the real `Credit` and `TokenRate`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.simulation.delays import Delays
from bench.simulation.virtual_clock import VirtualClock
from bench.simulation.work_stream import WorkPull, WorkStream
from gpu_worker.engines.engine import FreeCapacity
from gpu_worker.pool.cache_report import CacheReport, CacheReporter
from gpu_worker.pool.credit import Credit, TokenRate
from simulation.engine import SimulatedEngine
from simulation.request import SimulatedRequest
from streams.messages import Heartbeat
from streams.subjects import Priority

VERSION = "v1"


@dataclass(frozen=True)
class Listeners:
    """Who hears of what a worker does; each is called when it happens there."""

    beat: Callable[[Heartbeat], None]
    first: Callable[[SimulatedRequest], None]
    ended: Callable[[SimulatedRequest, str], None]  # with the code, empty when it ended well


class SimulatedWorker:
    """Serves one model from its pool for as long as the clock runs."""

    def __init__(
        self,
        name: str,
        engine: SimulatedEngine,
        pool: WorkStream,
        clock: VirtualClock,
        delays: Delays,
        tell: Listeners,
    ) -> None:
        self.name, self.engine = name, engine
        self._pool, self._clock, self._delays, self._tell = pool, clock, delays, tell
        model = engine.model
        self.credit = Credit(FreeCapacity(model.max_sequences, model.kv_tokens), preempts=True)
        self._rate = TokenRate(clock.now)
        self._held: dict[str, SimulatedRequest] = {}
        self._seqs: dict[str, int] = {}  # in WORK, of what is held
        self._pulls: dict[Priority, WorkPull] = {}
        self._pulled: dict[str, int] = {}
        self._own: WorkPull | None = None
        self._pulled_own = 0
        self._holdings = CacheReporter()
        self._beats = 0  # that were sent
        self._beat_at, self._beat_is_due = -1.0, False
        self._stepping = False

    def start(self) -> None:
        self._send_beat()
        self._pull()

    # Work

    def _pull(self) -> None:
        """One outstanding pull for each priority, while there is room."""
        for priority in Priority:
            pull = self._pulls.get(priority)
            if (pull is None or not pull.wanted) and (
                wanted := self.credit.pull_batch_size(priority)
            ):
                self._pulls[priority] = pull = WorkPull(self._taking(priority), wanted)
                self._pool.pull(priority, pull)
        self._pull_own()

    def _pull_own(self) -> None:
        """What was placed here is taken as soon as there is room for anything."""
        wanted = self.credit.pull_batch_size(Priority.INTERACTIVE)
        if wanted and (self._own is None or not self._own.wanted):
            self._own = WorkPull(self._take_own, wanted)
            self._pool.pull(self.name, self._own)

    def _take_own(self, fate: SimulatedRequest, seq: int) -> None:
        self._pulled_own = max(self._pulled_own, seq)
        self._begin(fate, seq)

    def _taking(self, priority: Priority) -> Callable[[SimulatedRequest, int], None]:
        def take(fate: SimulatedRequest, seq: int) -> None:
            self._pulled[priority] = max(self._pulled.get(priority, 0), seq)
            self._begin(fate, seq)

        return take

    def _begin(self, fate: SimulatedRequest, seq: int) -> None:
        self._held[fate.request_id] = fate
        self._seqs[fate.request_id] = seq
        fate.started, fate.worker = self._clock.now, self.name
        asked = fate.spec
        self.credit.reserve(fate.request_id, asked.prompt_tokens, asked.cost, fate.priority)
        self._changed()
        self._pull()
        self._clock.call_at(max(self._clock.now, fate.deadline), lambda: self._expire(fate))
        self._clock.call_later(self._delays.store, lambda: self._add(fate))  # its claim is stored

    def _add(self, fate: SimulatedRequest) -> None:
        if fate.request_id in self._held:
            self.engine.add(fate)
            self._step()

    def _expire(self, fate: SimulatedRequest) -> None:
        if self._held.pop(fate.request_id, None):
            self.engine.cancel(fate.request_id)
            self._clock.call_later(
                self._delays.store, lambda: self._over(fate, "deadline_exceeded")
            )

    # Steps

    def _step(self) -> None:
        if self._stepping:
            return
        seconds = self.engine.begin_step()
        if seconds is not None:
            self._stepping = True
            self._clock.call_later(seconds, self._stepped)

    def _stepped(self) -> None:
        self._stepping = False
        stepped = self.engine.finish_step()
        for fate in stepped.first:
            if fate.request_id in self._held:
                self._clock.call_later(
                    self._delays.store + self._delays.hop, self._says_first(fate)
                )
        for fate in stepped.ended:
            if self._held.pop(fate.request_id, None):
                # the last chunk, then the terminal
                self._clock.call_later(2 * self._delays.store, self._says_over(fate))
        self._step()

    def _says_first(self, fate: SimulatedRequest) -> Callable[[], None]:
        return lambda: self._tell.first(fate)

    def _says_over(self, fate: SimulatedRequest) -> Callable[[], None]:
        return lambda: self._over(fate, "")

    def _over(self, fate: SimulatedRequest, code: str) -> None:
        self.credit.release(fate.request_id)
        del self._seqs[fate.request_id]
        self._tell.ended(fate, code)
        self._changed()
        self._pull()

    # Beats

    def _changed(self) -> None:
        if not self._beat_is_due:
            self._beat_is_due = True
            due = max(self._clock.now, self._beat_at + self._delays.beat_gap)
            self._clock.call_at(due, self._send_beat)

    def _send_beat(self) -> None:
        self._beat_is_due, self._beat_at = False, self._clock.now
        self._beats += 1
        number = self._beats
        beat = self.beat()
        self._clock.call_later(self._delays.hop, lambda: self._tell.beat(beat))
        rest = self._delays.progress if self._held else self._delays.beat
        self._clock.call_later(rest, lambda: self._rest(number))

    def _rest(self, number: int) -> None:
        if number == self._beats:
            self._send_beat()

    def beat(self) -> Heartbeat:
        """As `gpu_worker.pool.model_server.Pool.beat`."""
        credit, now = self.credit, self._clock.now
        due = self._holdings.is_due(now)
        told = (
            self._holdings.report(self.engine.cached_prefix_hashes(), now) if due else CacheReport()
        )
        progress = list(self.engine.progress())
        for fate, generated in progress:
            asked = fate.spec
            credit.update_generated(fate.request_id, asked.prompt_tokens, asked.cost, generated)
        self._rate.total_tokens = self.engine.generated_tokens
        return Heartbeat(
            worker=self.name,
            model="sim",
            version=VERSION,
            free_sequences=credit.free_sequences,
            free_tokens=credit.free_tokens,
            running=min(credit.held, credit.max_sequences),
            waiting=max(0, credit.held - credit.max_sequences),
            max_sequences=credit.max_sequences,
            kv_tokens=credit.kv_tokens,
            generated_tokens=self._rate.total_tokens,
            tokens_per_second=round(self._rate.sample(self._clock.now), 3),
            pulled=dict(self._pulled),
            pulled_own=self._pulled_own,
            holds=told.holds,
            dropped=told.dropped,
            holds_only=told.holds_only,
            room={str(priority): credit.free_capacity(priority) for priority in Priority},
            progress=[
                (self._seqs[fate.request_id], generated)
                for fate, generated in progress
                if generated and fate.request_id in self._seqs
            ],
        )
