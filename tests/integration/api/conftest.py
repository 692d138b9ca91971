"""No test of a day's counters runs across midnight."""

import time

import pytest

from streams.quota_windows import QuotaPeriod

LONGEST_TEST_SECONDS = 120.0


@pytest.fixture(autouse=True)
def within_one_day() -> None:
    """Counters of a day begin anew at midnight UTC, also in the middle of a test."""
    left = QuotaPeriod.DAY.seconds_left(time.time())
    if left < LONGEST_TEST_SECONDS:
        time.sleep(left)
