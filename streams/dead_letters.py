"""Work that nobody could finish, kept for the operator."""

from collections.abc import Mapping
from typing import Protocol

from streams import subjects
from streams.connection import Broker
from streams.headers import MESSAGE_ID, Envelope
from streams.token_log import PATIENCE_SECONDS

UNKNOWN = "unknown"  # the tenant of work whose headers say nothing


class Work(Protocol):
    """A message of WORK, as delivered or as stored."""

    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def seq(self) -> int: ...


async def keep(
    broker: Broker, work: Work, envelope: Envelope | None, model: str, reason: str
) -> None:
    """Store a dead letter, once; the broker's own headers are left behind."""
    kept = {k: v for k, v in work.headers.items() if not k.startswith("Nats-")}
    name = envelope.request_id if envelope else f"{UNKNOWN}-{work.seq}"
    subject = subjects.dead(envelope.tenant if envelope else UNKNOWN, model)
    headers = kept | {"Reason": reason, MESSAGE_ID: name}
    await broker.store_retrying(subject, work.data, headers, PATIENCE_SECONDS)
