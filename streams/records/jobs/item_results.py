"""Results of items: one for each line of a batch, written once by whoever ends the item.

A request that runs an item says so in its headers (`ItemRef`). When it ends, its result is stored
before its terminal, with the expectation that there is none: whatever is repeated, and however many
processes try, a line has one result. A failure that may pass is a result only at the last try; else
it is stored beside, as that of one try, so that the job's owner learns of it from the same stream.
Pure.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from streams import messages, subjects
from streams.messages import FinishReason, Record, TokenUsage
from streams.records.log_contents import LogContents, RequestEnd

_ID_DIGITS = 31
# Codes of failures after which another try may succeed
PASSING_FAILURES = frozenset(
    {
        "attempts_exhausted",
        "broker_unavailable",
        "deadline_exceeded",
        "engine_failed",
        "internal_error",
        "log_lost",
        "overloaded",
        "upstream_failed",
        "work_lost",
    }
)
_ENDS_IN_QUEUE = frozenset({"deadline_exceeded", "work_lost"})
CANCELLED: Final = "cancelled"


@dataclass(frozen=True)
class ItemResult:
    """Result of a job's line: what it generated, or why it failed.

    `code` is empty for a success, else that of the error in `message`. `text`, `logprobs`,
    `vectors` and `labels` are those of the request's token log, of all its records. `ended` is in
    epoch milliseconds, and `usage` as OpenAI's. `chunks` has the numbers of tokens and characters
    of each chunk of the log, so that a stream of the result is that of the log; a line, which
    nobody streams, has none. `attempts` and `first_output_at` are those of the request's end.
    """

    request_id: str
    attempt: int
    ended: int
    code: str = ""
    message: str = ""
    finish: FinishReason | None = None
    version: str = ""
    usage: TokenUsage = field(default_factory=dict)
    text: str = ""
    logprobs: list[dict[str, Any]] | None = None
    vectors: list[bytes] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    stop_sequence: str = ""  # the stop string that ended the text
    chunks: list[list[int]] = field(default_factory=list)
    attempts: int = 0
    first_output_at: int = 0

    @property
    def may_pass(self) -> bool:
        """True if another try may succeed where this one failed."""
        return self.code in PASSING_FAILURES

    @property
    def never_ran(self) -> bool:
        """True if the deadline passed, or the work was lost, before any worker had begun.

        That is no try.
        """
        return self.code in _ENDS_IN_QUEUE and not self.version

    def to_terminal(self) -> dict[str, Any]:
        """Return the terminal of the token log that was removed behind this result."""
        if self.code and self.code != CANCELLED:
            return messages.error_record(self.code, self.message, self.usage)
        return messages.done_record(self.finish or "cancelled", self.usage, {}, self.stop_sequence)

    def to_end(self) -> RequestEnd:
        """Return the end of the request, whose token log was perhaps removed."""
        return RequestEnd(self.to_terminal(), self.version, self.attempts, self.first_output_at)

    def pack(self) -> bytes:
        """Return the result as msgpack."""
        return messages.pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the result that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire = messages.unpack(data)
        if not isinstance(wire, dict):
            raise ValueError("it is no map")
        result = messages.from_wire(cls, wire)
        if not result._is_sound:
            raise ValueError("it has values of other types")
        return result

    @property
    def _is_sound(self) -> bool:
        texts = (
            self.request_id,
            self.code,
            self.message,
            self.version,
            self.text,
            self.stop_sequence,
        )
        numbers = (self.attempt, self.ended, self.attempts, self.first_output_at)
        return (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(number, int) for number in numbers)
            and isinstance(self.usage, dict)
            and isinstance(self.usage.get("prompt_tokens", 0), int)
            and isinstance(self.usage.get("completion_tokens", 0), int)
            and all(isinstance(vector, bytes) for vector in self.vectors)
            and all(isinstance(number, int) for chunk in self.chunks for number in chunk)
        )


def build_result(
    request_id: str,
    attempt: int,
    ended: int,
    records: list[Record],
    terminal: Mapping[str, Any],
) -> ItemResult:
    """Return the result of a request, of its token log's records and the terminal that ends it."""
    chunks = [record for record in records if record["type"] == "chunk"]
    logprobs = [each for chunk in chunks for each in chunk.get("logprobs") or ()]
    rows = [record for record in records if record["type"] == "result"]
    end = LogContents(records).ended_by(terminal)
    streamed = [] if subjects.is_line(request_id) else chunks
    is_error = terminal["type"] == "error"
    finish = None if is_error else terminal["finish_reason"]
    return ItemResult(
        request_id=request_id,
        attempt=attempt,
        ended=ended,
        code=terminal["code"] if is_error else CANCELLED if finish == CANCELLED else "",
        message=terminal["message"] if is_error else "",
        finish=finish,
        version=end.version,
        usage=dict(terminal["usage"]),
        text="".join(chunk["text"] for chunk in chunks),
        logprobs=logprobs or None,
        vectors=[vector for row in rows for vector in row["vectors"]],
        labels=rows[-1].get("labels", []) if rows else [],
        stop_sequence=terminal.get("stop_sequence", ""),
        chunks=[[each["count"], len(each["text"])] for each in streamed],
        attempts=end.attempts,
        first_output_at=end.first_output_at,
    )


def make_request_id(secret: bytes, index: int, attempt: int) -> str:
    """Return the id of the request that is a try of a line.

    Nobody without the job's secret can guess it, and it is the same whenever the job's owner
    repeats itself.
    """
    digest = hmac.digest(secret, f"{index}.{attempt}".encode(), hashlib.sha256).hex()
    return f"{subjects.ITEM_PREFIX}{digest[:_ID_DIGITS]}"
