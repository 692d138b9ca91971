"""Reads the ledger's messages in order, beginning with those of the last seconds."""

from collections.abc import Mapping
from datetime import UTC, datetime

from streams import topology
from streams.broker.broker_client import Broker, StoredMessage
from streams.headers import STORED_AT

PAGE = 100  # messages: about 5 ms of the event loop


class LedgerReader:
    """The messages of the ledger that were stored at `since` (epoch seconds) or later.

    Each is read once, in the order in which the broker has stored them. Nothing is kept anywhere:
    another reader that begins at the same time reads the same.
    """

    def __init__(self, broker: Broker, since: float) -> None:
        self._broker = broker
        self._start_time = datetime.fromtimestamp(since, UTC).isoformat()
        self._read_to: int | None = None  # sequence of the last message; None before the first

    async def read_page(self) -> list[StoredMessage]:
        """Return the next messages; an empty list if there are none now.

        Raises `BrokerUnavailable`; the same messages come again then.
        """
        query = {"next_by_subj": ">", "batch": PAGE, **self._begin}
        page = await self._broker.read_page(topology.LEDGER, query)
        if page.messages:
            self._read_to = page.messages[-1].seq
        return page.messages

    def begin_anew(self) -> None:
        """Read from the beginning: the ledger is another stream now, with sequences of its own."""
        self._read_to = None

    @property
    def _begin(self) -> Mapping[str, int | str]:
        if self._read_to is None:
            return {"start_time": self._start_time}
        return {"seq": self._read_to + 1}


def stored_at(message: StoredMessage) -> float:
    """Return when the broker has stored a message, in epoch seconds."""
    return datetime.fromisoformat(message.headers[STORED_AT]).timestamp()
