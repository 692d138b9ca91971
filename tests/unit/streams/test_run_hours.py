"""Hours of the day in which a batch may run."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.records.jobs.run_hours import RunHours

NIGHT = RunHours.parse("22:00", "06:00", "Europe/Berlin")


def berlin(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()


@pytest.mark.parametrize(
    ("time", "is_open"),
    [
        ("2026-11-28T21:59:59", False),
        ("2026-11-28T22:00:00", True),
        ("2026-11-29T00:00:00", True),
        ("2026-11-29T05:59:59", True),
        ("2026-11-29T06:00:00", False),
    ],
)
def test_hours_over_midnight_are_those_of_their_zone(time: str, is_open: bool) -> None:
    """From the first second of the one minute to before that of the other."""
    assert NIGHT.is_open(berlin(time)) is is_open


def test_hours_within_a_day_do_not_wrap() -> None:
    """The later time is the end."""
    noon = RunHours.parse("11:00", "13:30", "Europe/Berlin")
    opens = [noon.is_open(berlin(f"2026-11-28T{t}")) for t in ("10:59", "13:29", "13:30", "23:00")]
    assert opens == [False, True, False, False]


def test_the_next_opening_is_on_the_next_day_if_todays_is_over() -> None:
    """It is now, if now is within the hours."""
    assert NIGHT.next_opening(berlin("2026-11-28T12:00")) == berlin("2026-11-28T22:00")
    assert NIGHT.next_opening(berlin("2026-11-28T23:00")) == berlin("2026-11-28T23:00")
    morning = RunHours.parse("02:30", "02:40", "Europe/Berlin")
    assert morning.next_opening(berlin("2026-11-28T12:00")) == berlin("2026-11-29T02:30")


@given(
    st.integers(0, 1439),
    st.integers(1, 1439),
    st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe", "America/St_Johns"]),
    st.integers(1_760_000_000, 1_800_000_000),
)
def test_every_opening_is_open(start: int, minutes: int, zone: str, now: int) -> None:
    """Also on days on which clocks are put forward or back."""
    hours = RunHours(start, (start + minutes) % 1440, zone)
    opening = hours.next_opening(now)
    assert opening >= now
    assert hours.is_open(opening)
    assert opening == now or not hours.is_open(now)


@pytest.mark.parametrize(
    ("told", "wrong"),
    [
        (("24:00", "06:00", "UTC"), "24:00"),
        (("6:00", "07:00", "UTC"), "6:00"),
        (("06:00", "06:00", "UTC"), "the same"),
        (("06:00", "07:00", "Mars/Olympus"), "Mars/Olympus"),
        (("06:00", "07:00", "../etc/passwd"), "passwd"),
    ],
)
def test_what_is_no_time_or_zone_is_refused(told: tuple[str, str, str], wrong: str) -> None:
    """The error says what came."""
    with pytest.raises(ValueError, match=wrong):
        RunHours.parse(*told)
