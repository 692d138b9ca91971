"""Guards engines against poison: quarantines suspect requests and records how attempts went."""

from collections.abc import Callable

import structlog

from gpu_worker.attempt.start_quarantine import QueuedStart, StartQuarantine
from streams.broker.broker_client import Broker, StoreRefused
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
from streams.records.log_contents import LogContents
from streams.records.token_log import RETRY_TIMEOUT_SECONDS
from streams.subjects import LogAddress

log = structlog.get_logger()

# New outputs after which a quarantined request has surely passed the point where it failed before,
# though the last outputs before that failure may not have been stored.
QUARANTINE_OUTPUTS = 8


class PoisonGuard:
    """Keeps one request from crashing engine after engine; one instance for each attempt at it.

    `history` tells how earlier attempts went, and this attempt adds notes to it for later ones. A
    suspect is a request whose next failure would be its last. It is quarantined while it starts,
    with no other request starting: if the engine or the process fails then, the suspect was to
    blame.

    The attempt calls `load_history` after it has claimed the token log, `request_start` and
    `record_start` before the request starts in the engine, `record_progress` while it runs, and
    `release_start` and `record_outcome` at the end.
    """

    def __init__(
        self, broker: Broker, address: LogAddress, worker: str, start_quarantine: StartQuarantine
    ) -> None:
        self.history = AttemptHistory()
        self.is_quarantined = False
        self._broker, self._address, self._worker = broker, address, worker
        self._start_quarantine = start_quarantine
        self._start: QueuedStart | None = None
        self._attempt = 1
        self._cleared_at = 0  # stored outputs with which the start is over

    async def load_history(self, before: LogContents) -> None:
        """Read how earlier attempts at the request went into `history`.

        `before` is the token log as it was before this attempt claimed it. While the broker does
        not answer, retries for 30 s, as long as the claim does: an attempt that gave up here would
        cost its request another ack wait. Raises `BrokerUnavailable` after that.
        """
        self._attempt = before.attempts + 1
        self.history = await retry_for(
            RETRY_TIMEOUT_SECONDS,
            lambda: attempt_history.read_history(self._broker, self._address, before),
        )

    def request_start(self, begin: Callable[[], None]) -> None:
        """Queue the request to start in the engine, and return at once.

        `begin` is called once, perhaps before this returns, when the request may start. A suspect
        may start only while no other request is starting. Call `release_start` later, whether or
        not the request has started.
        """
        self._start = self._start_quarantine.enqueue(self.history.is_suspect, begin)

    async def record_start(self, stored: int) -> None:
        """Record that the request is about to start with `stored` tokens or vectors in its log.

        A suspect is quarantined: a note of that is stored before this returns, since the start may
        end this very process. Raises `BrokerUnavailable` or `StoreRefused` if the note cannot be
        stored. For other requests nothing is stored or raised.
        """
        self._cleared_at = stored + 1
        if self.history.is_suspect:
            self._cleared_at = stored + QUARANTINE_OUTPUTS
            await self._store_note("trial")  # first: the start may end this very process
            self.is_quarantined = True

    async def record_progress(self, stored: int) -> None:
        """Record that the log now has `stored` tokens or vectors; end the start if they suffice.

        One new token or vector is enough. A quarantined request needs eight; it then leaves
        quarantine, with a note of that (best effort). Once the start is over, other requests may
        start.
        """
        if self._start and stored >= self._cleared_at:
            if self.is_quarantined:
                self.is_quarantined = False
                await self._try_to_store_note("passed")
            self.release_start()

    def release_start(self) -> None:
        """End the request's start, or take it out of the quarantine, so that others can start.

        Idempotent.
        """
        if self._start:
            self._start_quarantine.release(self._start)
            self._start = None

    async def record_outcome(self, kind: NoteKind, error: str = "") -> None:
        """Store a note of how this attempt went, for later attempts and the operator.

        Best effort: an error is logged and not raised. An attempt without a note counts as one
        whose worker has crashed.
        """
        await self._try_to_store_note(kind, error)

    def build_poison_history(self, error: str) -> AttemptHistory:
        """Return the history plus this attempt as one that failed, with `error`, by its own fault.

        Nothing is stored, and `history` does not change.
        """
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
