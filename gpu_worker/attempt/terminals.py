"""Builds the terminal that ends a request, and the record of it for observers."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpu_worker.engines.engine import Output
from streams import messages
from streams.messages import LedgerRecord, TokenUsage


class StopReason(Enum):
    """Reason for which an attempt was told to stop before its engine had finished the request."""

    CANCELLED = "cancelled"
    EXPIRED = "deadline_exceeded"
    EXHAUSTED = "attempts_exhausted"  # it makes engines fail
    RELEASED = "released"  # left to other workers: no terminal


@dataclass(frozen=True)
class FinishedRequest:
    """A request that has ended, for metrics: its usage record, and the milliseconds by stage."""

    record: LedgerRecord
    timing: dict[str, float]


def build_terminal(
    end: Output | None,
    stop_reason: StopReason | None,
    usage: TokenUsage,
    timing: dict[str, float],
    failures: int,
) -> dict[str, Any]:
    """Return a request's terminal: the last record of its token log, of type `done` or `error`.

    `end` is the engine's last output, if the engine has finished the request. Its error or finish
    reason decides; otherwise `stop_reason` does: exhausted and expired become errors, anything else
    is `done` with the reason `cancelled`. `timing` is in milliseconds by stage; `failures` is the
    number of failed attempts, for the message of an exhausted request.
    """
    if end and end.error:
        return messages.error_record(end.error.code, str(end.error), usage)
    if end and end.finish and end.finish != "cancelled":
        return messages.done_record(end.finish, usage, timing, end.matched_stop)
    if stop_reason is StopReason.EXHAUSTED:
        return messages.error_record(
            "attempts_exhausted", f"{failures} attempts at this request failed", usage
        )
    if stop_reason is StopReason.EXPIRED:
        return messages.error_record("deadline_exceeded", "the deadline has passed", usage)
    return messages.done_record("cancelled", usage, timing)
