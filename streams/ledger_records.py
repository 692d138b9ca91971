"""Builds ledger records from what a request's headers and its terminal say. Pure."""

from collections.abc import Mapping
from typing import Any

from streams import messages
from streams.headers import Envelope
from streams.messages import LedgerRecord


def build_ledger_record(
    envelope: Envelope, model: str, terminal: Mapping[str, Any], finished: int, **facts: Any
) -> LedgerRecord:
    """Return the ledger record of a request that ended with `terminal` at `finished` (epoch ms).

    `terminal` is the last record of its token log. `facts` are the fields of the record that only
    its writer knows: `version`, `worker` and `attempts`, and others where they are known.
    """
    usage = terminal["usage"]
    known = {
        "request_id": envelope.request_id,
        "tenant": envelope.tenant,
        "model": model,
        "outcome": terminal.get("finish_reason") or terminal["code"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": messages.cached_tokens(usage),
        "accepted": envelope.accepted,
        "finished": finished,
        "adapter": envelope.adapter,
        "account": envelope.account,
        "priority": envelope.priority,
        "deadline": envelope.deadline,
        "goal_ms": envelope.goal_ms,
        "price": envelope.price,
        "key": envelope.key,
        "user": envelope.user,
    }
    return LedgerRecord(**{**known, **facts})
