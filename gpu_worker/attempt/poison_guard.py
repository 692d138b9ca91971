"""Guards engines against poison: quarantines suspect requests and records how attempts went."""

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

# New outputs after which a quarantined request has surely passed the point where it failed before,
# though the last outputs before that failure may not have been stored.
QUARANTINE_OUTPUTS = 8


class PoisonGuard:
    """One attempt's view of its request's history, and the notes that it adds to it.

    Call `load_history` after the claim, `request_start` and `record_start` before the request
    starts in the engine, `record_progress` while it runs, `release_start` and `record_outcome` at
    the end. A suspect, a request whose next failure would be its last, is quarantined while it
    starts, and starts alone: if the engine or the process fails then, that request was to blame.
    """

    def __init__(
        self, broker: Broker, address: LogAddress, worker: str, start_queue: StartQueue
    ) -> None:
        self.history = AttemptHistory()
        self.is_quarantined = False
        self._broker, self._address, self._worker = broker, address, worker
        self._start_queue = start_queue
        self._start: QueuedStart | None = None
        self._attempt = 1
        self._cleared_at = 0  # stored outputs with which the start is over

    async def load_history(self, before: LogContents) -> None:
        """Read the request's history, given the log as it was before this attempt's claim.

        Retries while the broker does not answer, for as long as the claim does: an attempt that
        gave up here would cost its request another ack wait. Raises `BrokerUnavailable` after that.
        """
        self._attempt = before.attempts + 1
        self.history = await retry_for(
            RETRY_TIMEOUT_SECONDS,
            lambda: attempt_history.read_history(self._broker, self._address, before),
        )

    def request_start(self, begin: Callable[[], None]) -> None:
        """Call `begin`, now or later, when the request may start; a suspect waits to be alone."""
        self._start = self._start_queue.enqueue(self.history.is_suspect, begin)

    async def record_start(self, stored: int) -> None:
        """Record that the request starts behind `stored` outputs, and quarantine it if suspect.

        Raises `BrokerUnavailable` or `StoreRefused`.
        """
        self._cleared_at = stored + 1
        if self.history.is_suspect:
            self._cleared_at = stored + QUARANTINE_OUTPUTS
            await self._store_note("trial")  # first: the start may end this very process
            self.is_quarantined = True

    async def record_progress(self, stored: int) -> None:
        """Note that `stored` outputs are stored by now, and end the start when they are enough.

        One new output is enough, eight for a quarantined request, which leaves quarantine then.
        """
        if self._start and stored >= self._cleared_at:
            if self.is_quarantined:
                self.is_quarantined = False
                await self._try_to_store_note("passed")
            self.release_start()

    def release_start(self) -> None:
        """Let other requests start. Idempotent."""
        if self._start:
            self._start_queue.release(self._start)
            self._start = None

    async def record_outcome(self, kind: NoteKind, error: str = "") -> None:
        """Best effort: record the attempt's outcome. A missing record is treated as a crash."""
        await self._try_to_store_note(kind, error)

    def build_poison_history(self, error: str) -> AttemptHistory:
        """Return the history with this attempt added as one that failed in quarantine."""
        note = self._make_note("broke", error)
        return self.history.with_attempt(
            PastAttempt(note.attempt, note.worker, FaultScope.OWN, note.error, note.at)
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
