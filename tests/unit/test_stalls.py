"""A consumer that delivers nothing though it should is noticed, and no other."""

from dispatcher.stalls import STALL_LOOKS, Stalls


def test_what_is_due_and_does_not_move_is_stalled() -> None:
    """It is told once; then whatever was done about it has as long again."""
    stalls = Stalls()
    seen = [stalls.is_stalled("c", 7, due=True) for _ in range(2 * STALL_LOOKS)]
    assert seen == 2 * [*[False] * (STALL_LOOKS - 1), True]


def test_each_delivery_and_each_pause_begins_anew() -> None:
    """A slow worker is no fault of the consumer, and neither is an empty queue."""
    stalls = Stalls()
    assert not any(stalls.is_stalled("c", n // 2, due=True) for n in range(20))
    assert not any(stalls.is_stalled("c", 9, due=n % STALL_LOOKS > 0) for n in range(20))


def test_consumers_are_told_apart() -> None:
    """One priority may be stuck while another one runs."""
    stalls = Stalls()
    for n in range(STALL_LOOKS - 1):
        assert not stalls.is_stalled("stuck", 7, due=True)
        assert not stalls.is_stalled("runs", n, due=True)
    assert stalls.is_stalled("stuck", 7, due=True)
    assert not stalls.is_stalled("runs", 9, due=True)
