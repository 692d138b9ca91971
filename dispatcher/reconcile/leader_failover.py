"""Saves a leader's state for its successor, and restores that of its predecessor.

A checkpoint is seconds old; the ledger tells what has ended since, and `WORK` what is in flight.
"""

import time

import structlog

from dispatcher.dispatching.model_state import ModelState
from dispatcher.reconcile import checkpoint
from dispatcher.reconcile.checkpoint import Checkpoint
from streams import messages, subjects, topology
from streams.broker import declaration
from streams.broker.connection import Broker
from streams.messages import LedgerRecord

log = structlog.get_logger()

CHECKPOINT_SECONDS = 5.0


class LeaderFailover:
    """Saves and restores the checkpoint of one model; only the last one is kept."""

    def __init__(self, broker: Broker, state: ModelState) -> None:
        self._broker, self._state = broker, state
        self._subject = subjects.checkpoint(state.model)
        self._saved = Checkpoint(0.0, 0, {})

    async def save(self) -> None:
        """Store a checkpoint if anything has changed since the last.

        Raises as `Broker.store` does.
        """
        stream = await declaration.stream_info(self._broker, topology.LEDGER)
        now = self._broker.clock.now()
        taken = checkpoint.capture(self._state, stream.state.last_seq, now)
        if (taken.ledger_seq, taken.tenants) != (self._saved.ledger_seq, self._saved.tenants):
            await self._broker.store(self._subject, taken.pack())
            self._saved = taken

    async def restore(self) -> None:
        """Restore the predecessor's checkpoint, if there is one.

        Call it before any other state is set.
        """
        query: dict[str, int | str] = {"last_by_subj": self._subject}
        for message in await self._broker.read(topology.CHECKPOINTS, query):
            try:
                self._saved = Checkpoint.unpack(message.data)
            except (TypeError, ValueError) as error:  # of another release: all tenants begin alike
                log.warning("checkpoint_unreadable", model=self._state.model, error=repr(error))
            else:
                checkpoint.restore(self._state, self._saved)

    async def replay_ledger(self) -> None:
        """Apply what has ended since the checkpoint; call it once it is known what is in flight."""
        if not self._saved.at:
            return
        ledger = subjects.ledger_of(self._state.model)
        for message in await self._broker.read_subject(
            topology.LEDGER, ledger, self._saved.ledger_seq
        ):
            record = messages.from_wire(LedgerRecord, messages.unpack(message.data))
            self._state.replay(record, time.monotonic())
