"""Events that tenants' webhooks are told of, in OpenAI's shape. Pure."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

import orjson

from streams import job_subjects


class EventType(StrEnum):
    """Types of events: OpenAI's names, and one of ours."""

    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_EXPIRED = "batch.expired"
    BATCH_CANCELLED = "batch.cancelled"
    RESPONSE_COMPLETED = "response.completed"
    RESPONSE_FAILED = "response.failed"
    RESPONSE_CANCELLED = "response.cancelled"
    RESPONSE_INCOMPLETE = "response.incomplete"
    THRESHOLD_REACHED = "quota.threshold_reached"


@dataclass(frozen=True)
class WebhookEvent:
    """Something that has happened to an object of a tenant, once.

    `object_id` is the id by which clients know the object, such as `batch_…`.
    """

    tenant: str
    type: EventType
    object_id: str

    @property
    def subject(self) -> str:
        """The subject on which it is stored; there is one for each type and object.

        Raises `InvalidToken` for a name that cannot be part of a subject.
        """
        return job_subjects.event(self.tenant, self.type, self.object_id)

    def encode(self, now: float) -> bytes:
        """Return the JSON that is sent; `now` is in epoch seconds.

        Its id is the same for whoever makes it. The object is named, not shown: whoever is told
        reads it with a key.
        """
        return encode_event(self.subject, self.type, {"id": self.object_id}, now)


def encode_event(subject: str, type: EventType, data: object, now: float) -> bytes:
    """Return the JSON of an event that is stored on a subject, which makes its id."""
    body = {"id": event_id(subject), "object": "event", "created_at": int(now), "type": type}
    return orjson.dumps({**body, "data": data})


def event_id(subject: str) -> str:
    """Return the id of the event on a subject: always the same, and a token of a subject."""
    return f"evt_{hashlib.sha256(subject.encode()).hexdigest()[:24]}"
