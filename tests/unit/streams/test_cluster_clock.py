"""The shared clock is as good as its best look, and believes no jump that does not last."""

import time
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streams.broker.cluster_clock import (
    DRIFT,
    STEP_SECONDS,
    STEPOUT_SECONDS,
    ClockSample,
    ClusterClock,
)

EPOCH = 1_800_000_000.0
HOUR = 3600.0
ROUNDING = 1e-6  # epoch times are floats
delays = st.floats(1e-4, 2.0)
looks = st.lists(st.tuples(st.floats(0, 1000), delays, delays), min_size=1, max_size=20)
jumps = st.floats(STEP_SECONDS + 1, HOUR) | st.floats(-HOUR, -STEP_SECONDS - 1)


@dataclass
class Machine:
    """A process with a clock, and a broker that it can look at; time passes when it is told to."""

    rate: float = 1.0  # of its ticks
    passed: float = 0.0
    broker_set: float = 0.0  # by so much the broker's clock was moved
    clock: ClusterClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = ClusterClock(self.ticks)

    def ticks(self) -> float:
        return 50.0 + self.passed * self.rate

    def look(self, wait: float = 0.0, there: float = 1e-3, back: float = 1e-3) -> ClockSample:
        """Look at the broker's clock after a while; the ways may take different times."""
        self.passed += wait
        asked = self.ticks()
        self.passed += there
        told = EPOCH + self.passed + self.broker_set
        self.passed += back
        look = ClockSample(asked, self.ticks(), told)
        self.clock.add_sample(look)
        return look

    @property
    def off(self) -> float:
        """How far the clock is ahead of what the broker's would be if nobody had set it."""
        return self.clock.now() - EPOCH - self.passed


@example(taken=[(0.0, 1e-4, 2.0)], drift=-7.027e-05)  # most of its error is drift during the look
@given(taken=looks, drift=st.floats(-0.9 * DRIFT, 0.9 * DRIFT))
def test_it_is_never_further_off_than_its_best_look(
    taken: list[tuple[float, float, float]], drift: float
) -> None:
    """However long answers take, and whichever way takes longer."""
    machine = Machine(rate=1 + drift)
    seen = [machine.look(*each) for each in taken]
    best = min(look.max_error(machine.ticks()) for look in seen)
    assert abs(machine.off) <= best + ROUNDING


def test_the_wall_clock_of_its_machine_is_nothing_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be wrong from the start, and may be set at any time."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    machine = Machine()
    machine.look()
    monkeypatch.setattr(time, "time", lambda: HOUR)
    assert abs(machine.off) <= 1e-3


def test_before_the_first_look_it_is_the_wall_clock() -> None:
    """Commands that compare nothing with other machines need no look."""
    before = time.time()
    clock = ClusterClock()
    assert before <= clock.now() + ROUNDING
    assert clock.now() <= time.time() + 1


@given(jump=jumps, count=st.integers(1, int(STEPOUT_SECONDS) - 1))
def test_a_jump_that_is_soon_undone_moves_nothing(jump: float, count: int) -> None:
    """A broker whose machine wakes up tells of the past until somebody sets its clock."""
    machine = Machine()
    machine.look()
    machine.broker_set = jump
    for _ in range(count):
        machine.look(wait=1)
        assert machine.clock.is_step_suspected
        assert abs(machine.off) < STEP_SECONDS
    machine.broker_set = 0
    machine.look(wait=1)
    assert not machine.clock.is_step_suspected
    assert abs(machine.off) < STEP_SECONDS


@given(jump=jumps)
def test_a_jump_that_lasts_is_followed(jump: float) -> None:
    """Who starts later knows no other time, and all must have the same."""
    machine = Machine()
    machine.look()
    machine.broker_set = jump
    machine.look(wait=1)
    machine.look(wait=STEPOUT_SECONDS)
    assert not machine.clock.is_step_suspected
    assert abs(machine.off - jump) <= 2e-3


def test_jumps_that_contradict_each_other_do_not_add_up() -> None:
    """Time that lasts is one time."""
    machine = Machine()
    machine.look()
    for number in range(60):
        machine.broker_set = HOUR if number % 2 else -HOUR
        machine.look(wait=1)
    assert abs(machine.off) <= 1e-2


@given(move=st.floats(-STEP_SECONDS, STEP_SECONDS))
def test_a_little_is_followed_at_once(move: float) -> None:
    """A leap second, and the clock of another broker that leads from now on."""
    machine = Machine()
    machine.look()
    machine.broker_set = move
    machine.look(wait=1)
    assert abs(machine.off - move) <= 2e-3 + DRIFT
