"""A leader keeps for its successor how the tenants stand, and begins where its predecessor was.

What it kept is seconds old; the ledger tells what has ended since, and `WORK` what is in flight.
"""

import time

import structlog

from dispatcher import checkpoint
from dispatcher.books import Books
from dispatcher.checkpoint import Checkpoint
from streams import declaration, messages, subjects, topology
from streams.connection import Broker
from streams.messages import LedgerRecord

log = structlog.get_logger()

KEEP_SECONDS = 5.0


class Succession:
    """The checkpoints of one model, of which the last one is kept."""

    def __init__(self, broker: Broker, books: Books) -> None:
        self._broker, self._books = broker, books
        self._subject = subjects.checkpoint(books.model)
        self._kept = Checkpoint(0.0, 0, {})

    async def keep(self) -> None:
        """Keep how things stand, if they have changed. Raises as `Broker.store` does."""
        stream = await declaration.stream_info(self._broker, topology.LEDGER)
        now = self._broker.clock.now()
        taken = checkpoint.take(self._books, stream.state.last_seq, now)
        if (taken.ledger, taken.tenants) != (self._kept.ledger, self._kept.tenants):
            await self._broker.store(self._subject, taken.pack())
            self._kept = taken

    async def restore(self) -> None:
        """Begin where the predecessor was, if it left anything; before anything else is known."""
        query: dict[str, int | str] = {"last_by_subj": self._subject}
        for message in await self._broker.read(topology.CHECKPOINTS, query):
            try:
                self._kept = Checkpoint.unpack(message.data)
            except (TypeError, ValueError) as error:  # of another release: everybody begins alike
                log.warning("checkpoint_unreadable", model=self._books.model, error=repr(error))
            else:
                checkpoint.restore(self._books, self._kept)

    async def replay(self) -> None:
        """Take in what has ended since; call it once it is known what is in flight."""
        if not self._kept.at:
            return
        ledger = subjects.ledger_of(self._books.model)
        for message in await self._broker.read_subject(topology.LEDGER, ledger, self._kept.ledger):
            record = messages.known(LedgerRecord, messages.unpack(message.data))
            self._books.replay(record, time.monotonic())
