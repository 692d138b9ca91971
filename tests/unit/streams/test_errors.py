"""Messages of errors give their numbers plainly."""

import pytest

from streams.errors import QuotaSpent, plain_number


@pytest.mark.parametrize(
    ("value", "text"),
    [(79_500, "79500"), (1e9, "1000000000"), (12.345, "12.3"), (5e-5, "0.00005"), (0, "0")],
)
def test_a_number_has_no_exponent(value: float, text: str) -> None:
    assert plain_number(value) == text


def test_a_spent_quota_says_plainly_how_long_to_wait() -> None:
    at = "2026-11-22T00:00:00Z"
    message = QuotaSpent("tokens_per_day", 1_000_000, 999_999, 79_512.4, at).message
    assert f"1000000, and 999999 is in use; try again in 79512 s, at {at}" in message
