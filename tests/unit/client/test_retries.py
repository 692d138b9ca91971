"""When the Python client tries again, and what its errors are."""

import pytest

from millstream_client.backoff import Backoff
from millstream_client.errors import BY_CODE, MillstreamError, RateLimited, error_of
from millstream_client.retry_budget import MAX_TOKENS, TOKENS_PER_SECOND, RetryBudget
from streams.errors import HTTP_STATUS

HTTP_ONLY = {
    "not_found",
    "method_not_allowed",
    "headers_too_large",
    "request_timeout",
    "unsupported_media_type",
    # of files, which it does not send
    "file_lost",
    "storage_full",
    "storage_quota_exceeded",
    "too_many_transfers",
    # of a durable answer to a NATS producer
    "answer_lost",
    # of the admin API, which has a client of its own
    "account_not_found",
    "accounts_not_told",
    "audit_full",
    "no_broker_keys",
    "tenant_not_publishing",
    "admin_key_exists",
    "key_ended",
    "key_not_found",
    "key_taken",
    "name_taken",
    "no_key_pepper",
    "tenant_configured",
    "tenant_exists",
    "tenant_not_found",
    "version_exists",
    "alias_moved",
}


def test_pauses_double_up_to_the_most() -> None:
    """The first try after a loss is made at once."""
    backoff = Backoff(initial=0.1, maximum=1.0, draw=lambda: 1.0)
    waits = [backoff.delay(failures) for failures in range(7)]
    assert waits == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff.delay(10**6) == 1.0


def test_clients_do_not_come_back_in_step() -> None:
    """All of them lost the same gateway at the same moment."""
    backoff = Backoff(initial=1.0, maximum=8.0)
    assert len({backoff.delay(3) for _ in range(20)}) > 1
    assert all(0 <= backoff.delay(3) <= 4.0 for _ in range(100))


def spend(budget: RetryBudget, count: int, now: float) -> float:
    """So many retries decided on at once: the longest wait of them."""
    longest = 0.0
    for _ in range(count):
        longest = max(longest, budget.delay(now))
        budget.withdraw()
    return longest


def test_retries_beyond_the_budget_wait_for_their_turn() -> None:
    """A fleet that is overloaded sees so many a second, and no more."""
    budget = RetryBudget(now=0)
    assert spend(budget, int(MAX_TOKENS), now=0) == 0
    assert spend(budget, 50, now=0) == pytest.approx(50 / TOKENS_PER_SECOND)


def test_a_tenth_of_the_requests_may_be_retried() -> None:
    """Who sends many may retry many."""
    budget = RetryBudget(now=0)
    spend(budget, int(MAX_TOKENS), now=0)
    for _ in range(200):
        budget.deposit()
    assert spend(budget, 20, now=0) == pytest.approx(0)
    assert budget.delay(now=0) > 0


def test_nobody_saves_up_retries_without_end() -> None:
    """A client that was quiet for a day does not flood on the next."""
    budget = RetryBudget(now=0)
    assert spend(budget, int(MAX_TOKENS), now=86_400) == 0
    assert budget.delay(now=86_400) > 0


def test_each_code_of_the_gateway_is_an_error_of_its_own() -> None:
    """A caller says `except QueueFull`, and not `if error.code ==`."""
    assert set(HTTP_STATUS) - HTTP_ONLY - set(BY_CODE) == set()


def test_an_error_has_what_the_frame_said() -> None:
    """Seconds, as everywhere in Python."""
    error = error_of({"code": "rate_limit_exceeded", "message": "slow", "retry_after_ms": 1500})
    assert isinstance(error, RateLimited)
    assert (error.code, error.message, error.retry_after) == ("rate_limit_exceeded", "slow", 1.5)
    assert str(error) == "rate_limit_exceeded: slow"


def test_a_code_of_tomorrow_is_still_an_error() -> None:
    """With its code, for who knows it."""
    error = error_of({"code": "sunspots", "message": "wait"})
    assert (type(error), error.code) == (MillstreamError, "sunspots")
