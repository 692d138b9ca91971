"""Saves a leader's state for its successor, and restores that of its predecessor.

A checkpoint is seconds old; the ledger tells what has ended since, and `WORK` what is in flight.
"""

import time

import structlog

from dispatcher.dispatching.model_state import ModelState
from dispatcher.reconcile import checkpoint
from dispatcher.reconcile.checkpoint import Checkpoint
from streams import subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.records.ledger_checks import ForgedRecord, unpack_stored_record

log = structlog.get_logger()

CHECKPOINT_SECONDS = 5.0


class LeaderFailover:
    """Hands what a leader knows of its model's tenants on to the next leader, through the broker.

    A new leader calls `restore`, then `replay_ledger`; while it leads it calls `save` every
    `CHECKPOINT_SECONDS` (5 s). The broker keeps only the last checkpoint.
    """

    def __init__(self, broker: Broker, state: ModelState) -> None:
        self._broker, self._state = broker, state
        self._subject = subjects.checkpoint(state.model)
        self._saved = Checkpoint(0.0, 0, {})

    async def save(self) -> None:
        """Store a checkpoint if the ledger or the tenants have changed since the last one.

        Raises `StoreRefused` if the broker refuses it, `BrokerUnavailable` if no answer comes.
        """
        stream = await declaration.stream_info(self._broker, topology.LEDGER)
        now = self._broker.clock.now()
        taken = checkpoint.capture(self._state, stream.state.last_seq, now)
        if (taken.ledger_seq, taken.tenants) != (self._saved.ledger_seq, self._saved.tenants):
            await self._broker.store(self._subject, taken.pack())
            self._saved = taken

    async def restore(self) -> None:
        """Read the predecessor's checkpoint and set the state to it; without one nothing happens.

        Call it before any other state is set. A checkpoint of another release that cannot be read
        is logged, and all tenants begin alike. Raises `BrokerUnavailable` if no answer comes.
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
        """Apply the ledger records of the requests that ended after the checkpoint was taken.

        Call it once it is known which requests are in flight. Without a checkpoint nothing happens.
        Raises `BrokerUnavailable` if no answer comes.
        """
        if not self._saved.at:
            return
        ledger = subjects.ledger_of(self._state.model)
        for message in await self._broker.read_subject(
            topology.LEDGER, ledger, self._saved.ledger_seq
        ):
            try:
                record = unpack_stored_record(message.subject, message.data)
            except ForgedRecord as error:
                log.error("ledger_record_unreadable", seq=message.seq, reason=str(error))
            else:
                self._state.replay(record, time.monotonic())
