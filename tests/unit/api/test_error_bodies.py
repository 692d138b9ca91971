"""Clients are told whether the same request may succeed if they send it again."""

import pytest

from api.error_bodies import retry_headers
from streams.errors import BadRequest, Ended, IdempotencyConflict, MillstreamError, Overloaded


@pytest.mark.parametrize(
    "error",
    [
        Ended("deadline_exceeded", "late"),
        Ended("attempts_exhausted", "it crashes workers"),
        Ended("cancelled", "cancelled"),
        IdempotencyConflict("another request"),
        BadRequest("wrong"),
    ],
)
def test_where_it_cannot_the_sdk_is_told_not_to(error: MillstreamError) -> None:
    """OpenAI's SDKs send a 409 or 504 twice more unless told otherwise."""
    assert retry_headers(error)["X-Should-Retry"] == "false"


@pytest.mark.parametrize(
    "error", [Ended("engine_failed", "broken"), Ended("log_lost", "lost"), Overloaded("busy", 2.0)]
)
def test_where_it_may_the_status_decides(error: MillstreamError) -> None:
    assert "X-Should-Retry" not in retry_headers(error)
