"""Records of responses, as the bucket `responses` has them. Pure.

A response is a job of one item: its result is in RESULTS at index 0, written by whoever ends the
request. The record is written once, but for a background response that is queued again, and for
one that is cancelled or deleted.
"""

import hashlib
import hmac
from dataclasses import dataclass, replace
from typing import Any, Self

from streams import messages
from streams.headers import ItemRef
from streams.records.cas.cas_record import CasRecord

ITEM = 0  # the index of a response's only item
_ID_DIGITS = 32


@dataclass(frozen=True)
class StoredResponse(CasRecord):
    """A response of a tenant, as it was asked for.

    `body` is the JSON of the request, checked. Times are epoch seconds: after `expires_at` the
    response is gone, and by `ends_at` the request of one that is not `background` has ended. `key`
    is the API key that it came with, as JSON without its secret. `attempt` is the number of the
    request that runs it, from 1.
    `revision` is the sequence of the record in its stream.
    """

    tenant: str
    id: str
    body: bytes
    created_at: int
    expires_at: int
    ends_at: float
    key: str = ""
    background: bool = False
    attempt: int = 1
    is_cancelled: bool = False
    is_deleted: bool = False

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the record that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire: dict[str, Any] = messages.unpack(data)
        return replace(messages.from_wire(cls, wire), revision=revision)

    def is_gone(self, now: float) -> bool:
        """Return whether the response was deleted, or its time is over, at epoch second `now`."""
        return self.is_deleted or now >= self.expires_at

    @property
    def request_id(self) -> str:
        """The id of the request that runs the current attempt."""
        return make_request_id(self.id, self.attempt)

    def as_cancelled(self) -> Self:
        """Return the record of a response that is not to go on."""
        return replace(self, is_cancelled=True)

    def as_deleted(self) -> Self:
        """Return what stays of the record until all that belongs to it is removed."""
        return replace(self, body=b"", key="", is_deleted=True)


def make_request_id(response: str, attempt: int) -> str:
    """Return the id of the request that is an attempt at a response; the first has the same id."""
    if attempt == 1:
        return response
    return hmac.digest(response.encode(), str(attempt).encode(), hashlib.sha256).hex()[:_ID_DIGITS]


def make_item_ref(response: str, attempt: int) -> ItemRef:
    """Return the reference by which whoever ends an attempt at a response stores its result.

    Every failure is the response's, since its tokens may have been seen; only a deadline that
    passes in the queue, or a queue that is lost, is none.
    """
    return ItemRef(response, ITEM, attempt, is_last=True)
