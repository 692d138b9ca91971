"""The gate: how many calls at once, and what is announced of it."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.remote.call_errors import RetryableError
from gpu_worker.engines.remote.circuit_breaker import FOREVER, CircuitBreaker
from gpu_worker.engines.remote.concurrency_limiter import ConcurrencyLimiter

BUSY = RetryableError("429", "busy", alive=True, throttles=True, retry_after=2.0)
DOWN = RetryableError("unreachable", "down")


def test_no_more_calls_than_the_limit() -> None:
    """The next one begins when one has ended."""
    gate = ConcurrencyLimiter(2, CircuitBreaker())
    first, _ = gate.acquire(0.0), gate.acquire(0.0)
    assert gate.wait_seconds(0.0) == FOREVER
    gate.release(first)
    assert gate.wait_seconds(0.0) == 0


def test_a_retry_after_holds_back_every_call_and_all_credit() -> None:
    """The server has said when it wants to be asked again, and not only by whom."""
    gate = ConcurrencyLimiter(8, CircuitBreaker())
    call = gate.acquire(0.0)
    gate.record_failure(call, BUSY, 0.0)
    gate.release(call)
    assert (gate.wait_seconds(0.5), gate.capacity(0.5)) == (1.5, 0)
    assert (gate.wait_seconds(2.0), gate.capacity(2.0)) == (0.0, 4)
    assert gate.breaker_state(2.0) == "closed"


def test_one_overload_halves_the_limit_once_and_success_raises_it_again() -> None:
    """All the calls that are refused at one moment tell of one overload."""
    gate = ConcurrencyLimiter(8, CircuitBreaker())
    for call in [gate.acquire(0.0) for _ in range(8)]:
        gate.record_failure(call, BUSY, 0.1)
        gate.release(call)
    assert gate.capacity(3.0) == 4
    for _ in range(40):
        call = gate.acquire(3.0)
        gate.record_answer(call)
        gate.release(call)
    assert gate.capacity(3.0) == 8


def test_a_server_that_is_down_gets_no_work_but_one_request_to_probe_with() -> None:
    """What is not announced stays in the queue, or goes to another worker."""
    gate = ConcurrencyLimiter(8, CircuitBreaker(failures=1, cooldown_seconds=1.0))
    call = gate.acquire(0.0)
    gate.record_failure(call, DOWN, 0.0)
    gate.release(call)
    assert [gate.capacity(now) for now in (0.0, 0.9, 1.0)] == [0, 0, 1]
    probe = gate.acquire(1.0)
    gate.record_answer(probe)
    assert gate.capacity(1.0) == 8


@given(st.lists(st.tuples(st.sampled_from(["ok", "busy", "down"]), st.floats(0, 5)), max_size=80))
def test_there_is_always_a_time_at_which_a_call_may_begin(events: list[tuple[str, float]]) -> None:
    """Whatever the server does, requests do not wait for nothing, nor beyond the limit."""
    gate, now = ConcurrencyLimiter(4, CircuitBreaker(failures=2)), 0.0
    for event, seconds in events:
        now += seconds
        wait = gate.wait_seconds(now)
        assert wait <= 30.0
        now += wait
        call = gate.acquire(now)
        if event == "ok":
            gate.record_answer(call)
        else:
            gate.record_failure(call, BUSY if event == "busy" else DOWN, now)
        gate.release(call)
        assert 0 <= gate.capacity(now) <= 4
