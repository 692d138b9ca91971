"""The gate: how many calls at once, and what is announced of it."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.remote.breaker import FOREVER, Breaker
from gpu_worker.engines.remote.faults import Fault
from gpu_worker.engines.remote.gate import Gate

BUSY = Fault("429", "busy", alive=True, throttles=True, retry_after=2.0)
DOWN = Fault("unreachable", "down")


def test_no_more_calls_than_the_limit() -> None:
    """The next one begins when one has ended."""
    gate = Gate(2, Breaker())
    first, _ = gate.begin(0.0), gate.begin(0.0)
    assert gate.wait(0.0) == FOREVER
    gate.end(first)
    assert gate.wait(0.0) == 0


def test_a_retry_after_holds_back_every_call_and_all_credit() -> None:
    """The server has said when it wants to be asked again, and not only by whom."""
    gate = Gate(8, Breaker())
    call = gate.begin(0.0)
    gate.failed(call, BUSY, 0.0)
    gate.end(call)
    assert (gate.wait(0.5), gate.capacity(0.5)) == (1.5, 0)
    assert (gate.wait(2.0), gate.capacity(2.0)) == (0.0, 4)
    assert gate.state(2.0) == "closed"


def test_one_overload_halves_the_limit_once_and_success_raises_it_again() -> None:
    """All the calls that are refused at one moment tell of one overload."""
    gate = Gate(8, Breaker())
    for call in [gate.begin(0.0) for _ in range(8)]:
        gate.failed(call, BUSY, 0.1)
        gate.end(call)
    assert gate.capacity(3.0) == 4
    for _ in range(40):
        call = gate.begin(3.0)
        gate.answered(call)
        gate.end(call)
    assert gate.capacity(3.0) == 8


def test_a_server_that_is_down_gets_no_work_but_one_request_to_probe_with() -> None:
    """What is not announced stays in the queue, or goes to another worker."""
    gate = Gate(8, Breaker(failures=1, cooldown_seconds=1.0))
    call = gate.begin(0.0)
    gate.failed(call, DOWN, 0.0)
    gate.end(call)
    assert [gate.capacity(now) for now in (0.0, 0.9, 1.0)] == [0, 0, 1]
    probe = gate.begin(1.0)
    gate.answered(probe)
    assert gate.capacity(1.0) == 8


@given(st.lists(st.tuples(st.sampled_from(["ok", "busy", "down"]), st.floats(0, 5)), max_size=80))
def test_there_is_always_a_time_at_which_a_call_may_begin(events: list[tuple[str, float]]) -> None:
    """Whatever the server does, requests do not wait for nothing, nor beyond the limit."""
    gate, now = Gate(4, Breaker(failures=2)), 0.0
    for event, seconds in events:
        now += seconds
        wait = gate.wait(now)
        assert wait <= 30.0
        now += wait
        call = gate.begin(now)
        if event == "ok":
            gate.answered(call)
        else:
            gate.failed(call, BUSY if event == "busy" else DOWN, now)
        gate.end(call)
        assert 0 <= gate.capacity(now) <= 4
