"""Schedule of attempts at webhooks."""

from datetime import UTC, datetime, timedelta

import pytest

from jobs.webhooks.retry_schedule import JITTER, RETRY_SECONDS, next_delay
from jobs.webhooks.webhook_call import parse_retry_after

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)


def test_ten_attempts_are_made_over_three_days() -> None:
    """The pauses are those that the specification proposes."""
    delays = [next_delay(tries, None, 0.0) for tries in range(1, 11)]
    assert delays == [*RETRY_SECONDS, None]
    total = timedelta(seconds=sum(RETRY_SECONDS))
    assert timedelta(days=3) <= total <= timedelta(days=3.5)


def test_a_delay_is_spread_upwards() -> None:
    """Deliveries that failed together do not come together again."""
    assert next_delay(2, None, 1.0) == pytest.approx(300 * (1 + JITTER))


@pytest.mark.parametrize(
    ("asked", "wanted"), [(None, 5), (1.0, 5), (60.0, 60), (1e9, 86_400), (0.0, 5)]
)
def test_an_endpoint_may_ask_for_more_time_but_not_for_less(
    asked: float | None, wanted: float
) -> None:
    """A day at most: else it could keep a delivery for ever."""
    assert next_delay(1, asked, 0.0) == wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("120", 120.0),
        (" 0 ", 0.0),
        ("Sat, 28 Nov 2026 12:01:00 GMT", 60.0),
        ("Sat, 28 Nov 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("-5", None),
        ("", None),
        ("Sat, 28 Nov 2026 12:01:00", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, wanted: float | None) -> None:
    """Anything else asks for nothing."""
    assert parse_retry_after(value, NOW) == wanted
