"""A consumer that delivers nothing though it should is noticed, and no other."""

from dispatcher.reconcile.stuck_consumer_detector import STUCK_SECONDS, StuckConsumerDetector

LATER = STUCK_SECONDS + 1


def test_what_is_due_and_does_not_move_is_stalled() -> None:
    """It is told once; then whatever was done about it has as long again."""
    stalls = StuckConsumerDetector()
    seen = [stalls.is_stuck("c", 7, now, due=True) for now in (0, 1, LATER, LATER, 2 * LATER)]
    assert seen == [False, False, True, False, True]


def test_each_delivery_and_each_pause_begins_anew() -> None:
    """A slow worker is no fault of the consumer, and neither is an empty queue."""
    stalls = StuckConsumerDetector()
    assert not any(stalls.is_stuck("c", n, n * LATER, due=True) for n in range(20))
    assert not any(stalls.is_stuck("c", 20, n * LATER, due=n % 2 > 0) for n in range(20))


def test_consumers_are_told_apart() -> None:
    """One priority may be stuck while another one runs."""
    stalls = StuckConsumerDetector()
    assert not stalls.is_stuck("stuck", 7, 0, due=True)
    assert not stalls.is_stuck("runs", 7, 0, due=True)
    assert not stalls.is_stuck("runs", 8, LATER, due=True)
    assert stalls.is_stuck("stuck", 7, LATER, due=True)
