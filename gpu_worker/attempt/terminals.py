"""Builds the terminal, the ledger record and the observers' record that end a request."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpu_worker.engines.engine import Output
from gpu_worker.identity import WorkerIdentity
from streams import messages
from streams.headers import Envelope
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
        return messages.done_record(end.finish, usage, timing)
    if stop_reason is StopReason.EXHAUSTED:
        return messages.error_record(
            "attempts_exhausted", f"{failures} attempts at this request failed", usage
        )
    if stop_reason is StopReason.EXPIRED:
        return messages.error_record("deadline_exceeded", "the deadline has passed", usage)
    return messages.done_record("cancelled", usage, timing)


def build_ledger_record(
    identity: WorkerIdentity,
    envelope: Envelope,
    terminal: Mapping[str, Any],
    attempts: int,
    first_output_at_ms: float,
    finished_at_ms: int,
) -> LedgerRecord:
    """Return the ledger record (the usage that is billed) of a request that ended with `terminal`.

    `attempts` counts the attempts at the request. Times are epoch milliseconds;
    `first_output_at_ms` is 0 if there was no output.
    """
    usage = terminal["usage"]
    return LedgerRecord(
        request_id=envelope.request_id,
        tenant=envelope.tenant,
        model=identity.model,
        version=identity.version,
        outcome=terminal.get("finish_reason") or terminal["code"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        attempts=attempts,
        worker=identity.worker,
        accepted=envelope.accepted,
        finished=finished_at_ms,
        adapter=envelope.adapter,
        account=envelope.account,
        first=round(first_output_at_ms),
        cached_tokens=messages.cached_tokens(usage),
    )
