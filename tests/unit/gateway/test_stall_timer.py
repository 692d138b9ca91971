"""When a client counts as one that does not read."""

from gateway.server.stall_timer import StallTimer


def test_it_lasts_from_the_last_progress() -> None:
    """Not from a first look that was before the kernel had taken what it could."""
    stall = StallTimer(buffered_bytes=100, now=0)
    assert stall.stalled_seconds(90, now=1) == 0
    assert stall.stalled_seconds(90, now=5) == 4
    assert stall.stalled_seconds(90, now=11) == 10


def test_a_buffer_that_grows_has_not_been_read() -> None:
    """Pings are written whether anybody reads or not."""
    stall = StallTimer(buffered_bytes=100, now=0)
    assert stall.stalled_seconds(106, now=5) == 5
    assert stall.stalled_seconds(106, now=10) == 10


def test_whatever_was_read_counts_after_it_grew() -> None:
    """Each look is held against the one before, not against the least there ever was."""
    stall = StallTimer(buffered_bytes=100, now=0)
    stall.stalled_seconds(120, now=5)
    assert stall.stalled_seconds(110, now=9) == 0
