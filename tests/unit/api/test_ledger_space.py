"""Tests of the limits from which on a filling ledger refuses requests."""

import pytest

from api.submission.ledger_space import RECORD_BYTES, LedgerUse

KIB = 1024


@pytest.mark.parametrize(
    ("stored", "accepted", "is_filling", "is_full"),
    [
        (0, 0, False, False),
        (690 * KIB, 0, False, False),
        (720 * KIB, 0, True, False),
        (910 * KIB, 0, True, False),
        (930 * KIB, 0, True, True),
        (720 * KIB, 303, True, False),
        (720 * KIB, 305, True, True),
    ],
)
def test_what_is_left_is_kept_for_what_was_accepted(
    stored: int, accepted: int, is_filling: bool, is_full: bool
) -> None:
    """A record that found no room would keep its request from being acknowledged."""
    use = LedgerUse(stored, KIB * KIB, accepted)
    assert (use.is_filling, use.is_full) == (is_filling, is_full)


def test_a_ledger_without_a_limit_is_never_full() -> None:
    assert not LedgerUse(10**12, 0, 10**6).is_full
    assert LedgerUse(10**12, 0, 10**6).used_ratio == 0
    assert RECORD_BYTES <= KIB
