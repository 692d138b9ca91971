"""Records of deliveries, as the bucket `deliveries` has them: one event to one endpoint. Pure."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self

from streams import messages, subjects
from streams.records.cas.cas_record import CasRecord

MAX_ATTEMPTS_SHOWN = 20  # of one delivery, also when it was asked for again and again


class DeliveryStatus(StrEnum):
    """State of a delivery."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class DeliveryKey(NamedTuple):
    """Tenant, endpoint and event, which together name a delivery."""

    tenant: str
    endpoint: str
    event: str


@dataclass(frozen=True)
class DeliveryAttempt:
    """One attempt: when it began, in epoch seconds, how long it took, and what was answered.

    `status` is that of the HTTP answer; None if none came, and then `error` says why.
    """

    at: float
    milliseconds: int
    status: int | None = None
    error: str = ""

    @property
    def is_success(self) -> bool:
        """True if the endpoint has taken the webhook: a status of 2xx, no redirect."""
        return self.status is not None and 200 <= self.status < 300


@dataclass(frozen=True)
class WebhookDelivery(CasRecord):
    """Record of one event and one endpoint.

    `body` is what is posted, each time the same. The next attempt is due at `due_at`, in epoch
    seconds; `tries` have been made since the delivery began or was asked for again, and `attempts`
    are the last of all. A test is tried once. `revision` is the sequence of the record in its
    stream.
    """

    tenant: str
    endpoint: str
    event: str
    type: str
    body: bytes
    created_at: int
    due_at: float
    status: DeliveryStatus = DeliveryStatus.PENDING
    tries: int = 0
    attempts: tuple[DeliveryAttempt, ...] = ()
    is_test: bool = False

    @property
    def key(self) -> DeliveryKey:
        """The names by which it is found."""
        return DeliveryKey(self.tenant, self.endpoint, self.event)

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the record that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire: dict[str, Any] = messages.unpack(data)
        known = messages.from_wire(cls, wire)
        return replace(
            known,
            tenant=subjects.token(known.tenant),
            endpoint=subjects.token(known.endpoint),
            event=subjects.token(known.event),
            created_at=int(known.created_at),
            due_at=float(known.due_at),
            status=DeliveryStatus(known.status),
            attempts=tuple(messages.from_wire(DeliveryAttempt, a) for a in wire["attempts"]),
            revision=revision,
        )

    def with_attempt(self, attempt: DeliveryAttempt, next_at: float | None) -> Self:
        """Return the record after an attempt; `next_at` None means that there is no further one.

        It is delivered if the attempt was a success.
        """
        status = DeliveryStatus.FAILED if next_at is None else DeliveryStatus.PENDING
        if attempt.is_success:
            status = DeliveryStatus.DELIVERED
        return replace(
            self,
            status=status,
            due_at=next_at or self.due_at,
            tries=self.tries + 1,
            attempts=(*self.attempts, attempt)[-MAX_ATTEMPTS_SHOWN:],
        )

    def as_failed(self) -> Self:
        """Return the record of a delivery that is given up."""
        return replace(self, status=DeliveryStatus.FAILED)

    def redelivered(self, now: float) -> Self:
        """Return the record of a delivery that begins anew, with the same id and body."""
        return replace(self, status=DeliveryStatus.PENDING, due_at=now, tries=0)
