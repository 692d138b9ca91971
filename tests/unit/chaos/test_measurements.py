"""What is made of a history: what processes held, what clients felt."""

from tests.chaos.checker import MIB
from tests.chaos.history import Event, FaultInjected, MemorySample
from tests.chaos.indexed_history import IndexedHistory
from tests.chaos.measurements import GROWTH_SECONDS, WARM_SECONDS, measure
from tests.unit.chaos.sample_history import GOOD_HISTORY

LONG = WARM_SECONDS + GROWTH_SECONDS


def held(process: str, pid: int, begin: float, end: float) -> list[Event]:
    """Of a process that fills its pools and then takes 6 MiB an hour."""
    return [
        MemorySample(at, process, pid, MIB * (200 if at > begin else 90) + int(at * MIB / 600))
        for at in (begin, *(begin + WARM_SECONDS + n for n in range(0, 2000, 50)))
        if at <= end
    ]


def test_growth_is_that_of_a_warm_process() -> None:
    """What is filled once is no leak, and what was restarted lately tells nothing."""
    events = [*held("gateway-0", 1, 0, LONG), *held("worker-0", 2, 0, 700)]
    events += held("worker-0", 3, 700, LONG)
    assert measure(IndexedHistory([*GOOD_HISTORY, *events])).growth == {"gateway-0": 6.0}


def test_what_is_felt_is_told_for_each_strike() -> None:
    """From the strike on, until the next one; what hits several at once is one strike."""
    strikes = [
        FaultInjected(0.55, "kill", "nats-0"),
        FaultInjected(2.0, "freeze", "gateway-0"),
        FaultInjected(2.1, "kill", "worker-0", undone=True),
    ]
    kill, freeze = measure(IndexedHistory([*GOOD_HISTORY, *strikes])).felt
    assert (kill.deed, kill.whom) == ("kill", "worker-0 nats-0")
    assert (kill.silence_max, kill.kept_out) == (1.4, 0.4)  # `a` from 0.6 on; `b` until 0.9
    assert (freeze.deed, freeze.whom) == ("freeze", "gateway-0")
    assert (freeze.silence_max, freeze.kept_out) == (1.1, 0.0)  # `a` until 3.1
