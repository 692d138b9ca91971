"""A worker's credit: never more than it can keep, and more urgent work sees what would give way."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.engine import FreeCapacity
from gpu_worker.pool.credit import Credit
from streams.messages import Heartbeat, pack
from streams.subjects import Priority

INTERACTIVE, STANDARD, BATCH = Priority


def test_batch_work_takes_no_room_from_what_is_more_urgent() -> None:
    """A worker full of batch work must be seen as free, or preemption never gets its chance."""
    credit = Credit(FreeCapacity(2, 100), preempts=True)
    for name in "ab":
        credit.reserve(name, 10, 50, BATCH)
    assert credit.free_capacity(BATCH) == (0, 0)
    assert credit.free_capacity(STANDARD) == credit.free_capacity(INTERACTIVE) == (2, 100)
    assert (credit.pull_batch_size(BATCH), credit.pull_batch_size(INTERACTIVE)) == (0, 1)


def test_no_more_is_asked_for_than_fits_as_a_rule() -> None:
    """It comes all the same when its room has gone, and somebody is computed again for it."""
    credit = Credit(FreeCapacity(64, 1000), preempts=True)
    assert credit.pull_batch_size(STANDARD) == 8
    credit.reserve("a", 100, 300, STANDARD)
    assert credit.pull_batch_size(STANDARD) == 2
    credit.reserve("b", 100, 300, STANDARD)
    assert credit.pull_batch_size(STANDARD) == 1
    assert credit.pull_batch_size(INTERACTIVE) == 8  # the others would give way


def test_an_engine_without_preemption_has_one_room_for_all() -> None:
    """What it holds stays, whatever else comes."""
    credit = Credit(FreeCapacity(2, 100))
    credit.reserve("a", 10, 60, BATCH)
    assert {credit.free_capacity(priority) for priority in Priority} == {(1, 40)}


def test_what_gave_way_waits_for_a_place() -> None:
    """It is still held, and no more of its kind may come before it runs again."""
    credit = Credit(FreeCapacity(1, 100), preempts=True)
    credit.reserve("a", 10, 20, BATCH)
    credit.reserve("b", 10, 20, INTERACTIVE)
    assert credit.free_capacity(BATCH)[0] == -1
    assert credit.free_capacity(INTERACTIVE)[0] == 0


def test_room_is_for_the_most_that_is_held_at_once() -> None:
    """One ends before the other is at its longest, so both need less than their sum."""
    credit = Credit(FreeCapacity(8, 1000))
    credit.reserve("long", 100, 500, STANDARD)
    credit.update_generated("long", 100, 500, generated=300)
    credit.reserve("short", 100, 150, STANDARD)
    # after 50 more tokens: 450 and 150; at the end of the long one 500 alone
    assert credit.free_tokens == 1000 - 600


@dataclass
class Running:
    prompt: int
    most: int
    generated: int = 0


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)),
        min_size=1,
        max_size=8,
    )
)
def test_what_was_taken_within_the_credit_never_needs_more_kv(
    sizes: list[tuple[int, int, int]],
) -> None:
    """Side by side, token by token: a promise that breaks means somebody is computed again."""
    credit, running = Credit(FreeCapacity(100, 200)), dict[str, Running]()
    for number, (prompt, most, steps) in enumerate(sizes):
        if prompt + most <= credit.free_tokens:
            credit.reserve(str(number), prompt, prompt + most, STANDARD)
            running[str(number)] = Running(prompt, most)
        run_on(credit, running, steps)
    run_on(credit, running, 51)
    assert not running


def run_on(credit: Credit, running: dict[str, Running], steps: int) -> None:
    for _ in range(steps):
        for name, each in list(running.items()):
            each.generated += 1
            if each.generated > each.most:
                del running[name]
                credit.release(name)
            else:
                credit.update_generated(name, each.prompt, each.prompt + each.most, each.generated)
        assert sum(each.prompt + each.generated for each in running.values()) <= 200


def test_a_beat_of_an_older_worker_is_read() -> None:
    """During a rolling restart workers beat that know neither room by priority nor progress."""
    old: dict[str, object] = {
        "worker": "w",
        "model": "m",
        "version": "1",
        "free_sequences": 3,
        "free_tokens": 70,
        "running": 1,
        "waiting": 0,
        "max_sequences": 4,
        "kv_tokens": 100,
        "generated_tokens": 0,
        "tokens_per_second": 0.0,
    }
    beat = Heartbeat.unpack(pack(old))
    assert {beat.free_capacity(priority) for priority in Priority} == {(3, 70)}
    assert beat.progress == []
