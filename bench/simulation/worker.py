"""A worker on the virtual clock: pulls what its credit allows, runs it, sends heartbeats.

It does what `gpu_worker/pool/model_server.py` and `gpu_worker/attempt/attempt.py` do, with the real
`Credit` and `TokenRate`.
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
    """Callbacks for what a worker does; each is called when it happens there."""

    beat: Callable[[Heartbeat], None]
    first: Callable[[SimulatedRequest], None]
    ended: Callable[[SimulatedRequest, str], None]  # with the error code, empty if it completed


class SimulatedWorker:
    """Serves one model from its pool's WORK for as long as the clock runs."""

    def __init__(
        self,
        name: str,
        engine: SimulatedEngine,
        work: WorkStream,
        clock: VirtualClock,
        delays: Delays,
        listeners: Listeners,
    ) -> None:
        self.name, self.engine = name, engine
        self._work, self._clock, self._delays, self._listeners = work, clock, delays, listeners
        model = engine.model
        self.credit = Credit(FreeCapacity(model.max_sequences, model.kv_tokens), preempts=True)
        self._rate = TokenRate(clock.now)
        self._held: dict[str, SimulatedRequest] = {}
        self._seqs: dict[str, int] = {}  # in WORK, of the requests it holds
        self._pulls: dict[Priority, WorkPull] = {}
        self._pulled: dict[str, int] = {}
        self._placed_pull: WorkPull | None = None
        self._pulled_placed = 0
        self._cache_reporter = CacheReporter()
        self._beats_sent = 0  # that were sent
        self._beat_at, self._beat_is_due = -1.0, False
        self._stepping = False

    def start(self) -> None:
        """Send the first heartbeat and begin to pull."""
        self._send_beat()
        self._pull()

    # Work

    def _pull(self) -> None:
        """Keep one outstanding pull for each priority while there is room."""
        for priority in Priority:
            pull = self._pulls.get(priority)
            if (pull is None or not pull.wanted) and (
                wanted := self.credit.pull_batch_size(priority)
            ):
                self._pulls[priority] = pull = WorkPull(self._make_take(priority), wanted)
                self._work.pull(priority, pull)
        self._pull_placed()

    def _pull_placed(self) -> None:
        """Pull what was placed here as soon as there is room for anything."""
        wanted = self.credit.pull_batch_size(Priority.INTERACTIVE)
        if wanted and (self._placed_pull is None or not self._placed_pull.wanted):
            self._placed_pull = WorkPull(self._take_placed, wanted)
            self._work.pull(self.name, self._placed_pull)

    def _take_placed(self, request: SimulatedRequest, seq: int) -> None:
        self._pulled_placed = max(self._pulled_placed, seq)
        self._begin(request, seq)

    def _make_take(self, priority: Priority) -> Callable[[SimulatedRequest, int], None]:
        """The callback for deliveries of a priority."""

        def take(request: SimulatedRequest, seq: int) -> None:
            self._pulled[priority] = max(self._pulled.get(priority, 0), seq)
            self._begin(request, seq)

        return take

    def _begin(self, request: SimulatedRequest, seq: int) -> None:
        self._held[request.request_id] = request
        self._seqs[request.request_id] = seq
        request.started, request.worker = self._clock.now, self.name
        spec = request.spec
        self.credit.reserve(request.request_id, spec.prompt_tokens, spec.cost, request.priority)
        self._schedule_beat()
        self._pull()
        self._clock.call_at(max(self._clock.now, request.deadline), lambda: self._expire(request))
        # The engine gets it when its claim is stored
        self._clock.call_later(self._delays.store, lambda: self._add(request))

    def _add(self, request: SimulatedRequest) -> None:
        if request.request_id in self._held:
            self.engine.add(request)
            self._begin_step()

    def _expire(self, request: SimulatedRequest) -> None:
        if self._held.pop(request.request_id, None):
            self.engine.cancel(request.request_id)
            self._clock.call_later(
                self._delays.store, lambda: self._end(request, "deadline_exceeded")
            )

    # Steps

    def _begin_step(self) -> None:
        if self._stepping:
            return
        seconds = self.engine.begin_step()
        if seconds is not None:
            self._stepping = True
            self._clock.call_later(seconds, self._finish_step)

    def _finish_step(self) -> None:
        self._stepping = False
        stepped = self.engine.finish_step()
        for request in stepped.first:
            if request.request_id in self._held:
                self._clock.call_later(
                    self._delays.store + self._delays.hop, self._report_first(request)
                )
        for request in stepped.ended:
            if self._held.pop(request.request_id, None):
                # The last chunk is stored, then the terminal
                self._clock.call_later(2 * self._delays.store, self._report_ended(request))
        self._begin_step()

    def _report_first(self, request: SimulatedRequest) -> Callable[[], None]:
        return lambda: self._listeners.first(request)

    def _report_ended(self, request: SimulatedRequest) -> Callable[[], None]:
        return lambda: self._end(request, "")

    def _end(self, request: SimulatedRequest, code: str) -> None:
        self.credit.release(request.request_id)
        del self._seqs[request.request_id]
        self._listeners.ended(request, code)
        self._schedule_beat()
        self._pull()

    # Heartbeats

    def _schedule_beat(self) -> None:
        """Send a heartbeat for a change, `heartbeat_gap` or more after the last."""
        if not self._beat_is_due:
            self._beat_is_due = True
            due = max(self._clock.now, self._beat_at + self._delays.heartbeat_gap)
            self._clock.call_at(due, self._send_beat)

    def _send_beat(self) -> None:
        self._beat_is_due, self._beat_at = False, self._clock.now
        self._beats_sent += 1
        number = self._beats_sent
        beat = self.beat()
        self._clock.call_later(self._delays.hop, lambda: self._listeners.beat(beat))
        idle_seconds = self._delays.progress if self._held else self._delays.heartbeat
        self._clock.call_later(idle_seconds, lambda: self._send_if_idle(number))

    def _send_if_idle(self, number: int) -> None:
        """Send a heartbeat unless another was sent after number `number`."""
        if number == self._beats_sent:
            self._send_beat()

    def beat(self) -> Heartbeat:
        """The worker's heartbeat now, built as `gpu_worker.pool.model_server.ModelServer` does."""
        credit, now = self.credit, self._clock.now
        due = self._cache_reporter.is_due(now)
        cache = (
            self._cache_reporter.report(self.engine.cached_prefix_hashes(), now)
            if due
            else CacheReport()
        )
        progress = list(self.engine.progress())
        for request, generated in progress:
            spec = request.spec
            credit.update_generated(request.request_id, spec.prompt_tokens, spec.cost, generated)
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
            pulled_own=self._pulled_placed,
            holds=cache.holds,
            dropped=cache.dropped,
            holds_only=cache.holds_only,
            room={str(priority): credit.free_capacity(priority) for priority in Priority},
            progress=[
                (self._seqs[request.request_id], generated)
                for request, generated in progress
                if generated and request.request_id in self._seqs
            ],
        )
