"""Queued requests as a leader knows them, for tests of what it thinks."""

from typing import Any

from dispatcher.lines import Queued
from streams.subjects import Priority

PROMPT, COST = 50, 100


def queued(number: int, tenant: str, priority: Priority = Priority.STANDARD, **more: Any) -> Queued:
    """The request `r<number>`; the later ones have higher numbers."""
    values = {"accepted": 0, "deadline": 10_000, "prompt_tokens": PROMPT, "cost": COST, **more}
    return Queued(
        request_id=f"r{number}",
        tenant=tenant,
        priority=priority,
        route="",
        version="",
        seq=number + 1,
        reply="",
        **values,
    )
