"""What is made of a history: what processes held, what clients felt."""

from tests.chaos.checker import MIB
from tests.chaos.figures import GROWN_SECONDS, WARM_SECONDS, figures
from tests.chaos.history import Event, Sampled, Struck
from tests.chaos.made import GOOD
from tests.chaos.story import Story

LONG = WARM_SECONDS + GROWN_SECONDS


def held(process: str, pid: int, begin: float, end: float) -> list[Event]:
    """Of a process that fills its pools and then takes 6 MiB an hour."""
    return [
        Sampled(at, process, pid, MIB * (200 if at > begin else 90) + int(at * MIB / 600))
        for at in (begin, *(begin + WARM_SECONDS + n for n in range(0, 2000, 50)))
        if at <= end
    ]


def test_growth_is_that_of_a_warm_process() -> None:
    """What is filled once is no leak, and what was restarted lately tells nothing."""
    events = [*held("gateway-0", 1, 0, LONG), *held("worker-0", 2, 0, 700)]
    events += held("worker-0", 3, 700, LONG)
    assert figures(Story([*GOOD, *events])).growth == {"gateway-0": 6.0}


def test_what_is_felt_is_told_for_each_strike() -> None:
    """From the strike on, until the next one; what hits several at once is one strike."""
    strikes = [
        Struck(0.55, "kill", "nats-0"),
        Struck(2.0, "freeze", "gateway-0"),
        Struck(2.1, "kill", "worker-0", undone=True),
    ]
    kill, freeze = figures(Story([*GOOD, *strikes])).felt
    assert (kill.deed, kill.whom) == ("kill", "worker-0 nats-0")
    assert (kill.silence_max, kill.kept_out) == (1.4, 0.4)  # `a` from 0.6 on; `b` until 0.9
    assert (freeze.deed, freeze.whom) == ("freeze", "gateway-0")
    assert (freeze.silence_max, freeze.kept_out) == (1.1, 0.0)  # `a` until 3.1
