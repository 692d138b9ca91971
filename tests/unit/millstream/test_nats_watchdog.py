"""When the embedded broker counts as ill: a restart costs its logs, and must be worth it."""

from millstream.up.nats_watchdog import UNHEALTHY_CHECKS, NatsHealth


def heard(*looks: tuple[int, str | None]) -> NatsHealth:
    """What is known after these looks: which life, and what was said."""
    health = NatsHealth(pid=0)
    for life, complaint in looks:
        health.record_check(life, complaint)
    return health


ILL = [(1, "write error")] * UNHEALTHY_CHECKS


def test_a_broker_that_was_well_and_complains_for_a_while_is_ill() -> None:
    """It does not get well by itself."""
    assert heard((1, ""), *ILL).is_unhealthy
    assert not heard((1, ""), *ILL[1:]).is_unhealthy


def test_the_life_in_which_everything_became_ready_was_well() -> None:
    """Its disk may be full before the first look."""
    assert heard(*[(0, complaint) for _, complaint in ILL]).is_unhealthy


def test_one_that_starts_may_complain_for_as_long_as_it_likes() -> None:
    """It reads its streams, or cannot be helped: restarted, it would begin anew for ever."""
    assert not heard(*ILL, *ILL).is_unhealthy
    assert not heard((1, ""), *[(2, complaint) for _, complaint in ILL]).is_unhealthy


def test_a_good_word_or_silence_in_between_begins_anew() -> None:
    """A moment is no illness, and nobody knows what a broker is that does not answer."""
    for other in ("", None):
        assert not heard((1, ""), *ILL[1:], (1, other), *ILL[1:]).is_unhealthy


def test_falling_ill_is_told_once() -> None:
    """A disk may be full for a night."""
    health = NatsHealth(pid=1)
    assert [health.record_check(1, "write error") for _ in range(UNHEALTHY_CHECKS + 2)].count(
        True
    ) == 1
