"""Headers of a request and of its work: all that is needed to queue and route it.

They stay the same on both hops, gateway to dispatcher and dispatcher to worker; the dispatcher adds
`Dispatched`, and the model's version is in the work's subject. Times are epoch milliseconds by the
cluster clock. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from streams.messages import Encoding
from streams.subjects import Priority, token

MESSAGE_ID = "Nats-Msg-Id"
EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_ID = "Nats-Expected-Last-Msg-Id"
INCREMENT = "Nats-Incr"
STORED_AT = "Nats-Time-Stamp"  # of a stored message that is read: when, as in RFC 3339, in UTC
REQUEST_INFO = "Nats-Request-Info"  # which user has sent a question, as the servers say it
ROUTE = "Route"
PRIORITY = "Priority"
CONTENT_TYPE = "Content-Type"
ACCEPT, ANSWER = "Accept", "Answer"  # of a producer's submission
TOLD_WAIT = "Told-Wait"
GOAL = "Goal"
CLAIM = "Claim"  # on `started` records: a random id that tells one claim from another
RESTART = "Restart"  # on a `started` record whose attempt begins anew: what is before it is void
ENDED = "Ended"  # on records that were stored again: when their request had ended
_ENCODING = "Encoding"
MAX_HEADER_BYTES = 4096  # share of the broker's `max_payload` that is kept for a message's headers


@dataclass(frozen=True)
class ItemRef:
    """Reference to a try of a job's line; `index` counts from 0 and `attempt` from 1."""

    job: str
    index: int
    attempt: int
    is_last: bool

    def pack(self) -> str:
        """Return the reference as the value of a header."""
        return f"{self.job}.{self.index}.{self.attempt}.{int(self.is_last)}"

    @classmethod
    def unpack(cls, packed: str) -> Self:
        """Return the reference that `pack` encoded; raises ValueError for another text."""
        job, index, attempt, is_last = packed.split(".")
        return cls(token(job), int(index), int(attempt), is_last == "1")


@dataclass(frozen=True)
class AnswerRef:
    """Reference to a durable answer: a producer's own id of the request, escaped, and its digest.

    The digest is that of the submission, by which another one under the same id is recognised. The
    answer to a replay takes the place of that to the request `replaces`.
    """

    key: str
    digest: str
    replaces: str = ""

    def pack(self) -> str:
        """Return the reference as the value of a header."""
        return ".".join(filter(None, (self.key, self.digest, self.replaces)))

    @classmethod
    def unpack(cls, packed: str) -> Self:
        """Return the reference that `pack` encoded; raises ValueError for another text."""
        key, digest, *replaces = packed.split(".")
        return cls(key, digest, *replaces[:1])


@dataclass(frozen=True, slots=True)
class Envelope:
    """A request's routing data: all that is needed to queue it and to choose its worker.

    `deadline`, `accepted` and `dispatched` are epoch milliseconds; `dispatched` is 0 until the
    dispatcher has published the request to WORK. `cost` is the prompt tokens plus the most tokens
    that the request may generate. `version` pins a version of the model, and `adapter` names one of
    the model's adapters; empty for neither. `tokenized_for` is the version whose tokens the prompt
    has; empty if nobody says so. `account` says where the request's use is counted
    (`streams/usage_accounts.py`), empty if nowhere. `estimated_wait_ms` is the wait that was
    estimated when the request was accepted; None if nothing was known. `priority` is the one the
    client asked for, since the priority of its work may differ. `prefix_hashes` are those of its
    prompt (`prefix_hashes.to_header`), by which it is sent to a worker that has the start of the
    prompt cached. `goal_ms` is the model's goal for the time to first token as it was when the
    request was accepted; None without one. `key` is the name of the API key that it came with, and
    `user` the hash of the end user whom the client named; empty without one. `price` is the packed
    `PriceEntry` by which it is billed, empty if it came from a gateway that knew of none. `item` is
    the line of a job that the request runs; None for any other request. `answer` is the durable
    answer that its producer wants; None without. `encoding` is that of its token log.
    """

    request_id: str
    tenant: str
    route: str
    cost: int
    prompt_tokens: int
    deadline: int
    accepted: int
    version: str = ""
    tokenized_for: str = ""
    dispatched: int = 0
    adapter: str = ""
    account: str = ""
    priority: str = ""
    estimated_wait_ms: int | None = None
    prefix_hashes: str = ""
    goal_ms: int | None = None
    key: str = ""
    user: str = ""
    price: str = ""
    item: ItemRef | None = None
    answer: AnswerRef | None = None
    encoding: Encoding = "msgpack"

    def to_headers(self) -> dict[str, str]:
        """Return the envelope as NATS headers; optional fields at their defaults are left out."""
        headers = {
            "Request": self.request_id,
            "Tenant": self.tenant,
            ROUTE: self.route,
            "Cost": str(self.cost),
            "Prompt-Tokens": str(self.prompt_tokens),
            "Deadline": str(self.deadline),
            "Accepted": str(self.accepted),
        }
        optional = {
            "Version": self.version,
            "Tokenized-For": self.tokenized_for,
            "Dispatched": self.dispatched,
            "Adapter": self.adapter,
            "Account": self.account,
            PRIORITY: self.priority,
            "Marks": self.prefix_hashes,
            "Key": self.key,
            "User": self.user,
            "Price": self.price,
            "Item": self.item and self.item.pack(),
            ANSWER: self.answer and self.answer.pack(),
            _ENCODING: self.encoding if self.encoding == "json" else "",
        }
        headers |= {name: str(value) for name, value in optional.items() if value}
        if self.estimated_wait_ms is not None:
            headers[TOLD_WAIT] = str(self.estimated_wait_ms)
        if self.goal_ms is not None:
            headers[GOAL] = str(self.goal_ms)
        return headers

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Self:
        """Return the envelope that `to_headers` encoded; unknown headers are ignored.

        Raises KeyError for a missing header and ValueError for a malformed one.
        """
        priority = headers.get(PRIORITY, "")
        return cls(
            request_id=token(headers["Request"]),
            tenant=token(headers["Tenant"]),
            route=token(headers[ROUTE]),
            cost=int(headers["Cost"]),
            prompt_tokens=int(headers["Prompt-Tokens"]),
            deadline=int(headers["Deadline"]),
            accepted=int(headers["Accepted"]),
            version=headers.get("Version", ""),
            tokenized_for=headers.get("Tokenized-For", ""),
            dispatched=int(headers.get("Dispatched", "0")),
            adapter=headers.get("Adapter", ""),
            account=headers.get("Account", ""),
            priority=priority and Priority(priority).value,
            estimated_wait_ms=int(headers[TOLD_WAIT]) if TOLD_WAIT in headers else None,
            prefix_hashes=headers.get("Marks", ""),
            goal_ms=int(headers[GOAL]) if GOAL in headers else None,
            key=headers.get("Key", ""),
            user=headers.get("User", ""),
            price=headers.get("Price", ""),
            item=ItemRef.unpack(headers["Item"]) if "Item" in headers else None,
            answer=AnswerRef.unpack(headers[ANSWER]) if ANSWER in headers else None,
            encoding="json" if headers.get(_ENCODING) == "json" else "msgpack",
        )
