"""How an attempt ends its request: what the client, the ledger and the observers are told."""

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
    """Why an attempt was told to stop before its engine was done."""

    CANCELLED = "cancelled"
    EXPIRED = "deadline_exceeded"
    EXHAUSTED = "attempts_exhausted"  # it makes engines fail
    RELEASED = "released"  # given back to the pool: no terminal


@dataclass(frozen=True)
class FinishedRequest:
    """What the observers learn of an attempt that ended its request."""

    record: LedgerRecord
    timing: dict[str, float]


def build_terminal(
    end: Output | None,
    stopped: StopReason | None,
    used: TokenUsage,
    timing: dict[str, float],
    failures: int,
) -> dict[str, Any]:
    """The last record of the log; what the engine said comes before why it was stopped."""
    if end and end.error:
        return messages.error_record(end.error.code, str(end.error), used)
    if end and end.finish and end.finish != "cancelled":
        return messages.done_record(end.finish, used, timing)
    if stopped is StopReason.EXHAUSTED:
        return messages.error_record(
            "attempts_exhausted", f"{failures} attempts at it failed", used
        )
    if stopped is StopReason.EXPIRED:
        return messages.error_record("deadline_exceeded", "the deadline has passed", used)
    return messages.done_record("cancelled", used, timing)


def build_ledger_record(
    who: WorkerIdentity,
    envelope: Envelope,
    terminal: Mapping[str, Any],
    attempts: int,
    first: float,
    finished: int,
) -> LedgerRecord:
    """What the request has used; when its first output was made and when it ended are epoch ms."""
    used = terminal["usage"]
    return LedgerRecord(
        request_id=envelope.request_id,
        tenant=envelope.tenant,
        model=who.model,
        version=who.version,
        outcome=terminal.get("finish_reason") or terminal["code"],
        prompt_tokens=used["prompt_tokens"],
        completion_tokens=used["completion_tokens"],
        attempts=attempts,
        worker=who.worker,
        accepted=envelope.accepted,
        finished=finished,
        adapter=envelope.adapter,
        account=envelope.account,
        first=round(first),
        cached_tokens=messages.cached_tokens(used),
    )
