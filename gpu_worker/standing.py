"""How far a request is trusted: what its earlier attempts say, and what this one will have said."""

from collections.abc import Callable

import structlog

from gpu_worker.starts import Start, Starts
from streams import history
from streams.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.history import Fault, History, Kind, Note, Try
from streams.patience import persistently_for
from streams.subjects import Log
from streams.token_log import PATIENCE_SECONDS, Contents

log = structlog.get_logger()

# New outputs after which a request on trial has got further than where it failed before, though its
# last ones may not have been stored then.
TRIAL_OUTPUTS = 8


class Standing:
    """One attempt's: `learn` at the claim, `ask` and `begin` before it starts, `leave` at the end.

    A request whose next failure would be its last is on trial while it starts, which it does alone:
    if its engine, or the process, fails then, it was to blame.
    """

    def __init__(self, broker: Broker, address: Log, worker: str, starts: Starts) -> None:
        self.history = History()
        self.on_trial = False
        self._broker, self._address, self._worker = broker, address, worker
        self._starts = starts
        self._start: Start | None = None
        self._attempt = 1
        self._passes_at = 0

    async def learn(self, before: Contents) -> None:
        """Read the history behind this attempt's claim.

        Rides out a broker that does not answer, as the claim did: an attempt that gave up here
        would cost its request another ack wait. Raises `BrokerUnavailable` after that.
        """
        self._attempt = before.attempts + 1
        self.history = await persistently_for(
            PATIENCE_SECONDS, lambda: history.read(self._broker, self._address, before)
        )

    def ask(self, begin: Callable[[], None]) -> None:
        """Call `begin` when it may start."""
        self._start = self._starts.ask(self.history.is_suspect, begin)

    async def begin(self, stored: int) -> None:
        """It starts behind so many outputs. Raises `BrokerUnavailable` or `StoreRefused`."""
        self._passes_at = stored + 1
        if self.history.is_suspect:
            self._passes_at = stored + TRIAL_OUTPUTS
            await self._note("trial")  # first: this process may be what it makes fail
            self.on_trial = True

    async def got_on(self, stored: int) -> None:
        """So many outputs are stored by now."""
        if self._start and stored >= self._passes_at:
            if self.on_trial:
                self.on_trial = False
                await self._try_to_note("passed")
            self.leave()

    def leave(self) -> None:
        """Others may start. Idempotent."""
        if self._start:
            self._starts.leave(self._start)
            self._start = None

    async def ended(self, kind: Kind, error: str = "") -> None:
        """Note how the attempt went, if that can be had; without a note it counts as a death."""
        await self._try_to_note(kind, error)

    def convicted(self, error: str) -> History:
        """The history with this attempt, which has failed on trial."""
        said = self._noted("broke", error)
        return self.history.and_then(Try(said.attempt, said.worker, Fault.OWN, said.error, said.at))

    async def _try_to_note(self, kind: Kind, error: str = "") -> None:
        try:
            await self._note(kind, error)
        except (BrokerUnavailable, StoreRefused) as refusal:
            log.warning("attempt_not_noted", kind=kind, reason=str(refusal))

    async def _note(self, kind: Kind, error: str = "") -> None:
        await history.note(self._broker, self._address, self._noted(kind, error))

    def _noted(self, kind: Kind, error: str) -> Note:
        return history.noted(self._attempt, self._worker, kind, self._broker.clock.now_ms(), error)
