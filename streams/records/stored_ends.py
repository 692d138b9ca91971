"""Ends of requests that outlive their token logs: results of lines of jobs, and durable answers."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from streams.broker.broker_client import Broker
from streams.headers import Envelope
from streams.records.answers.durable_answer import DurableAnswer
from streams.records.jobs.job_item import JobItem
from streams.records.log_contents import RequestEnd


class StoredEnd(Protocol):
    """Record that whoever ends a request stores once, before the terminal.

    Both methods raise `BrokerUnavailable`, and storing `StoreRefused` if there is no room.
    """

    async def read_end(self) -> RequestEnd | None:
        """Return how the request ended; None while nothing is stored."""

    async def store_result(
        self, packed: Iterable[bytes], terminal: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Store how the request ends, given its token log's packed records. Idempotent.

        Returns the terminal that counts: another one if somebody was faster.
        """


def stored_end_of(broker: Broker, envelope: Envelope) -> StoredEnd | None:
    """Return what is to be stored of the end of a request; None if its token log is enough."""
    if envelope.item:
        return JobItem(broker, envelope, envelope.item)
    return DurableAnswer(broker, envelope, envelope.answer) if envelope.answer else None
