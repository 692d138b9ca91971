"""Who is refused because of the estimated wait, and why."""

from dataclasses import replace

import pytest

from gateway.admission.load_shedding import (
    MAX_PRESSURE_AGE_SECONDS,
    NO_WORKER_GRACE_SECONDS,
    RESUME_RATIO,
    LatencyTarget,
    LoadShedder,
)
from streams.errors import NoWorkers, Overloaded, Refused, TenantBacklog
from streams.messages import Pressure, ServiceTime, pack
from streams.subjects import Priority

WISH = LatencyTarget("acme", Priority.STANDARD, 10, 100, deadline_seconds=60)


def waits(alone: float | None, own: float | None = None, **more: object) -> LoadShedder:
    tenants = {} if own is None else {"acme": {"standard": own}}
    found = LoadShedder()
    found.update(Pressure("mock", 1, {}, {"standard": alone}, tenants, **more), 0.0)  # type: ignore[arg-type]  # of a test
    return found


def refusal(found: LoadShedder, wish: LatencyTarget = WISH, now: float = 0.0) -> Refused:
    with pytest.raises(Refused) as error:
        found.admit(wish, now)
    return error.value


@pytest.mark.parametrize(
    ("wait", "now"), [(59.0, 0.0), (None, 0.0), (99.0, MAX_PRESSURE_AGE_SECONDS + 0.1)]
)
def test_what_may_be_in_time_comes_in(wait: float | None, now: float) -> None:
    """Old or missing news is no reason to refuse: the request waits where waiting is durable."""
    found = waits(wait)
    assert found.admit(WISH, now) == (None if now else wait)
    assert LoadShedder().admit(WISH, 0.0) is None


def test_an_overloaded_model_says_so_with_the_estimate() -> None:
    """And when it may be worth another try."""
    error = refusal(waits(100.0))
    assert type(error) is Overloaded
    assert error.estimated_wait_seconds == 100.0
    assert error.retry_after_seconds == pytest.approx(100 - RESUME_RATIO * 59.9)
    assert "100.0 s (at worst 100.0 s) is too long for the deadline of 60 s" in str(error)


def test_what_is_let_in_is_in_time_at_worst() -> None:
    """As far as waits have been from what was told, of late."""
    found = waits(40.0, uncertainty=0.1)
    assert found.admit(WISH, 0.0) == 40.0
    assert "55.0 s (at worst 67.8 s)" in str(refusal(waits(55.0, uncertainty=0.1)))


def test_a_tenant_behind_its_own_backlog_is_told_so() -> None:
    """It is its own to change; others are let in meanwhile."""
    found = waits(1.0, own=100.0)
    assert type(refusal(found)) is TenantBacklog
    assert found.admit(replace(WISH, tenant="other"), 0.0) == 1.0
    assert type(refusal(waits(90.0, own=100.0))) is Overloaded


def test_what_the_request_itself_takes_is_left_of_the_deadline() -> None:
    """Its first token, and then the part of its output that requests have used."""
    compute = ServiceTime(first=1, per_prompt_token=0.1, per_output_token=0.5, output_share=0.5)
    found = waits(60 - 2 - 22.5 - 0.2, compute=compute)
    assert found.admit(WISH, 0.0) is not None
    assert isinstance(refusal(waits(60 - 2 - 22.5, compute=compute)), Overloaded)


def test_a_goal_bounds_the_wait_for_the_first_token() -> None:
    """Goals are of the model, for each priority."""
    wish = replace(WISH, goal_seconds=2.0)
    found = waits(1.5, compute=ServiceTime(first=0.5))
    assert "the goal of 2 s to the first token" in str(refusal(found, wish))
    assert waits(1.2, compute=ServiceTime(first=0.5)).admit(wish, 0.0) == 1.2


def test_nobody_is_refused_where_nothing_waits() -> None:
    """A prompt that is too long for the goal on an idle fleet is no overload."""
    wish = replace(WISH, goal_seconds=0.5)
    assert waits(0.0, compute=ServiceTime(first=9.0)).admit(wish, 0.0) == 0.0


def test_what_was_let_in_since_counts_until_the_next_news() -> None:
    """Or everybody would come in within a fifth of a second."""
    found = waits(58.0, own=58.0, seconds_per_token=0.01)
    assert found.admit(WISH, 0.0) == 58.0
    assert found.admit(WISH, 0.0) == pytest.approx(59.0)
    assert refusal(found).estimated_wait_seconds == pytest.approx(60.0)
    assert found.admit(replace(WISH, tenant="other"), 0.0) == 58.0
    urgent = replace(WISH, priority=Priority.INTERACTIVE)
    assert found.admit(urgent, 0.0) is None


def test_what_has_room_at_once_waits_for_nobody() -> None:
    """Beside batch work that gives way, say: only what is let in beyond the room has to wait."""
    found = waits(0.0, seconds_per_token=0.5, room_tokens={"standard": 250.0})
    assert found.admit(WISH, 0.0) == 0.0
    assert found.admit(WISH, 0.0) == 0.0
    assert found.admit(WISH, 0.0) == 0.0
    assert found.admit(WISH, 0.0) == pytest.approx(25.0)


def test_more_urgent_requests_count_whoever_sent_them() -> None:
    """They go first."""
    found = waits(58.0, seconds_per_token=0.01)
    for _ in range(3):
        found.admit(replace(WISH, tenant="other", priority=Priority.INTERACTIVE), 0.0)
    assert refusal(found).estimated_wait_seconds == pytest.approx(61.0)


def test_who_was_refused_comes_in_again_when_the_wait_is_well_below() -> None:
    """All those who were refused try again: recovery is no flood."""
    found = waits(60.0)
    refusal(found)
    found.update(Pressure("mock", 1, {}, {"standard": 55.0}), 0.2)
    refusal(found, now=0.2)
    assert found.admit(replace(WISH, tenant="other"), 0.2) == 55.0
    found.update(Pressure("mock", 1, {}, {"standard": RESUME_RATIO * 59.9}), 0.4)
    assert found.admit(WISH, 0.4) is not None
    found.update(Pressure("mock", 1, {}, {"standard": 55.0}), 0.6)
    assert found.admit(WISH, 0.6) == 55.0


@pytest.mark.parametrize("unmanned", [0.0, NO_WORKER_GRACE_SECONDS - 1])
def test_a_model_whose_worker_restarts_still_queues(unmanned: float) -> None:
    """Whoever comes back within the grace finds the work waiting."""
    found = LoadShedder()
    found.update(Pressure("mock", 0, {}, {"standard": None}, unmanned_seconds=unmanned), 0.0)
    assert found.admit(WISH, 0.0) is None


def test_a_model_that_nobody_serves_is_refused_at_once() -> None:
    """Otherwise it would wait in silence until its deadline."""
    found = LoadShedder()
    found.update(
        Pressure("mock", 0, {}, {"standard": 0.0}, unmanned_seconds=NO_WORKER_GRACE_SECONDS), 0.0
    )
    error = refusal(found)
    assert isinstance(error, NoWorkers)
    assert error.retry_after_seconds == 10.0
    assert found.admit(WISH, MAX_PRESSURE_AGE_SECONDS + 0.1) is None


def test_news_of_an_older_dispatcher_is_understood() -> None:
    """It has no tenants, no pace, and never says that nobody serves."""
    old = {"model": "m", "workers": 0, "queued": {}, "wait_seconds": {"standard": 61.0}}
    pressure = Pressure.unpack(pack(old | {"new": 1}))
    found = LoadShedder()
    found.update(pressure, 0.0)
    assert isinstance(refusal(found), Overloaded)
    assert Pressure.unpack(pressure.pack()) == pressure


def test_a_goal_is_met_though_computing_takes_longer_at_times() -> None:
    """By as much as it lately has."""
    wish = replace(WISH, goal_seconds=4.0)
    assert waits(1.5, compute=ServiceTime(first=1.0, first_spread=0.5)).admit(wish, 0.0) == 1.5
    refusal(waits(1.8, compute=ServiceTime(first=1.0, first_spread=0.5)), wish)


def at_zero(**more: object) -> LoadShedder:
    """A model whose last worker left long ago."""
    found = LoadShedder()
    told = Pressure("mock", 0, {}, {"standard": 900.0}, unmanned_seconds=900.0, **more)  # type: ignore[arg-type]  # of a test
    found.update(told, 0.0)
    return found


def test_what_the_fleet_wakes_in_time_comes_in_at_zero() -> None:
    """However long no worker was there, whatever it waited before, and with a goal, too."""
    found = at_zero()
    assert found.admit(replace(WISH, goal_seconds=1.0), 0.0, seconds_to_worker=59.0) == 59.0
    assert refusal(found).code == "no_workers"  # where no fleet wakes the model


def test_what_the_fleet_wakes_too_late_is_refused_with_the_time() -> None:
    """The time to compute counts, too."""
    found = at_zero(compute=ServiceTime(first=5.0))
    with pytest.raises(
        NoWorkers, match=r"ready in 56\.0 s, .* the deadline of 60 s: give"
    ) as error:
        found.admit(WISH, 0.0, seconds_to_worker=56.0)
    assert error.value.retry_after_seconds == 56.0
    assert found.admit(WISH, 0.0, seconds_to_worker=54.0) == 54.0


def test_a_model_with_a_worker_is_judged_by_its_queue() -> None:
    """Whatever a cold start would take."""
    assert waits(1.0).admit(WISH, 0.0, seconds_to_worker=900.0) == 1.0
