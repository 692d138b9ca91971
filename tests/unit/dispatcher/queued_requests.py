"""Queued requests as a leader knows them, for tests of what it thinks."""

from typing import Any

from dispatcher.queueing.tenant_queues import QueuedRequest
from streams.subjects import Priority

PROMPT, COST = 50, 100


def queued_request(
    number: int, tenant: str, priority: Priority = Priority.STANDARD, **more: Any
) -> QueuedRequest:
    """The request `r<number>`; the later ones have higher numbers."""
    values = {"accepted": 0, "deadline": 10_000, "prompt_tokens": PROMPT, "cost": COST, **more}
    return QueuedRequest(
        request_id=f"r{number}",
        tenant=tenant,
        priority=priority,
        route="",
        version="",
        seq=number + 1,
        reply="",
        **values,
    )
