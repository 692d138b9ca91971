"""How far a request is trusted: what its earlier attempts say, and what this one will have said."""

from collections.abc import Callable

import structlog

from gpu_worker.attempt.start_queue import QueuedStart, StartQueue
from streams.broker.connection import Broker, StoreRefused
from streams.broker.retry import retry_for
from streams.errors import BrokerUnavailable
from streams.records import attempt_history
from streams.records.attempt_history import (
    AttemptHistory,
    AttemptNote,
    FaultScope,
    NoteKind,
    PastAttempt,
)
from streams.records.token_log import RETRY_TIMEOUT_SECONDS, LogContents
from streams.subjects import LogAddress

log = structlog.get_logger()

# New outputs after which a request on trial has got further than where it failed before, though its
# last ones may not have been stored then.
QUARANTINE_OUTPUTS = 8


class PoisonGuard:
    """One attempt's: `learn` at the claim, `ask` and `begin` before it starts, `leave` at the end.

    A request whose next failure would be its last is on trial while it starts, which it does alone:
    if its engine, or the process, fails then, it was to blame.
    """

    def __init__(
        self, broker: Broker, address: LogAddress, worker: str, starts: StartQueue
    ) -> None:
        self.history = AttemptHistory()
        self.is_quarantined = False
        self._broker, self._address, self._worker = broker, address, worker
        self._start_queue = starts
        self._start: QueuedStart | None = None
        self._attempt = 1
        self._cleared_at = 0

    async def load_history(self, before: LogContents) -> None:
        """Read the history behind this attempt's claim.

        Rides out a broker that does not answer, as the claim did: an attempt that gave up here
        would cost its request another ack wait. Raises `BrokerUnavailable` after that.
        """
        self._attempt = before.attempts + 1
        self.history = await retry_for(
            RETRY_TIMEOUT_SECONDS,
            lambda: attempt_history.read_history(self._broker, self._address, before),
        )

    def request_start(self, begin: Callable[[], None]) -> None:
        """Call `begin` when it may start."""
        self._start = self._start_queue.enqueue(self.history.is_suspect, begin)

    async def record_start(self, stored: int) -> None:
        """It starts behind so many outputs. Raises `BrokerUnavailable` or `StoreRefused`."""
        self._cleared_at = stored + 1
        if self.history.is_suspect:
            self._cleared_at = stored + QUARANTINE_OUTPUTS
            await self._store_note("trial")  # first: this process may be what it makes fail
            self.is_quarantined = True

    async def record_progress(self, stored: int) -> None:
        """So many outputs are stored by now."""
        if self._start and stored >= self._cleared_at:
            if self.is_quarantined:
                self.is_quarantined = False
                await self._try_to_store_note("passed")
            self.release_start()

    def release_start(self) -> None:
        """Others may start. Idempotent."""
        if self._start:
            self._start_queue.release(self._start)
            self._start = None

    async def record_outcome(self, kind: NoteKind, error: str = "") -> None:
        """Note how the attempt went, if that can be had; without a note it counts as a death."""
        await self._try_to_store_note(kind, error)

    def build_poison_history(self, error: str) -> AttemptHistory:
        """The history with this attempt, which has failed on trial."""
        said = self._make_note("broke", error)
        return self.history.with_attempt(
            PastAttempt(said.attempt, said.worker, FaultScope.OWN, said.error, said.at)
        )

    async def _try_to_store_note(self, kind: NoteKind, error: str = "") -> None:
        try:
            await self._store_note(kind, error)
        except (BrokerUnavailable, StoreRefused) as refusal:
            log.warning("attempt_not_recorded", kind=kind, reason=str(refusal))

    async def _store_note(self, kind: NoteKind, error: str = "") -> None:
        await attempt_history.store_note(self._broker, self._address, self._make_note(kind, error))

    def _make_note(self, kind: NoteKind, error: str) -> AttemptNote:
        return attempt_history.make_note(
            self._attempt, self._worker, kind, self._broker.clock.now_ms(), error
        )
