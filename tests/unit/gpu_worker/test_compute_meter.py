"""All time of a worker belongs to somebody, to the nanosecond."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.compute_meter import ComputeMeter, ComputeTimes


class Clock:
    """Nanoseconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def a_meter(*models: str) -> tuple[ComputeMeter, Clock]:
    clock = Clock()
    return ComputeMeter(models, 0, clock), clock


def run_step(meter: ComputeMeter, clock: Clock, time: int, **tokens: int) -> None:
    meter.begin_step("m")
    clock.now += time
    meter.end_step("m", tokens)


def test_a_step_is_divided_by_tokens() -> None:
    """A long prompt pays for the step that it makes long."""
    meter, clock = a_meter("m")
    run_step(meter, clock, 1000, prompt=9, decode=1)
    assert (meter.take("m", "prompt"), meter.take("m", "decode")) == (900, 100)


def test_what_a_division_leaves_over_is_carried() -> None:
    """No nanosecond is rounded away: the next step has it."""
    meter, clock = a_meter("m")
    run_step(meter, clock, 10, a=1, b=1, c=1)
    run_step(meter, clock, 2, a=1, b=1, c=1)
    assert [meter.take("m", name) for name in "abc"] == [4, 4, 4]


def test_a_step_without_tokens_belongs_to_the_next() -> None:
    """A batch that waits to be full is there for those that will be in it."""
    meter, clock = a_meter("m")
    run_step(meter, clock, 70)
    run_step(meter, clock, 30, a=1)
    assert meter.take("m", "a") == 100


def test_waiting_is_idle_and_loading_is_not() -> None:
    """Both have lines of their own."""
    meter, clock = a_meter("m")
    clock.now = 5
    with meter.loading("m"):
        clock.now = 25
    clock.now = 26
    assert meter.report() == {"m": ComputeTimes(26, 6, 20, 0)}
    assert meter.report() == {"m": ComputeTimes(0, 0, 0, 0)}


def test_models_share_what_passes_at_once() -> None:
    """Two engines in a step have half of the machine each; one that loads beside them waits."""
    meter, clock = a_meter("m", "n", "o")
    meter.begin_step("m")
    with meter.loading("o"):
        clock.now = 10
        meter.begin_step("n")
        clock.now = 31
        meter.end_step("m", {"a": 1})
        clock.now = 40
        meter.end_step("n", {"b": 1})
    assert meter.take("m", "a") == 10 + 11
    assert meter.take("n", "b") == 10 + 9
    assert meter.report()["o"] == ComputeTimes(0, 0, 0, 0)


def test_what_nobody_took_is_lost_at_last() -> None:
    """An attempt that was cut off has cost, too."""
    meter, clock = a_meter("m")
    run_step(meter, clock, 100, cut_off=1)
    meter.lose("m", 7)
    assert meter.report() == {"m": ComputeTimes(100, 0, 0, 7)}
    run_step(meter, clock, 100, cut_off=2)
    assert meter.report(is_last=True) == {"m": ComputeTimes(100, 0, 0, 200)}


EVENTS = st.tuples(
    st.sampled_from(["begin", "end", "wait"]),
    st.sampled_from(["m", "n"]),
    st.integers(0, 10**9),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 4096)),
)


@given(st.lists(EVENTS))
def test_the_parts_are_together_what_has_passed(
    events: list[tuple[str, str, int, dict[str, int]]],
) -> None:
    """Requests, idle time, loads and what was lost: the difference is 0."""
    meter, clock = a_meter("m", "n")
    in_step: set[str] = set()
    for event, model, time, tokens in events:
        clock.now += time
        if event == "begin" and model not in in_step:
            in_step.add(model)
            meter.begin_step(model)
        elif event == "end" and model in in_step:
            in_step.remove(model)
            meter.end_step(model, tokens)
    taken = sum(meter.take(model, name) for model in "mn" for name in "ab")
    times = meter.report(is_last=True).values()
    assert sum(each.elapsed for each in times) == clock.now
    assert taken + sum(each.idle + each.load + each.lost for each in times) == clock.now


def test_models_that_come_and_go_share_the_time_in_which_they_are_there() -> None:
    """The last report of a model that went has all of its time, and later ones leave it out."""
    meter, clock = a_meter("a")
    clock.now = 10
    meter.add("b")
    clock.now = 30
    meter.retire("a")
    clock.now = 37
    assert meter.report() == {"a": ComputeTimes(20, 20, 0, 0), "b": ComputeTimes(17, 17, 0, 0)}
    clock.now = 40
    assert meter.report() == {"b": ComputeTimes(3, 3, 0, 0)}


def test_time_without_any_model_waits_for_the_next_one() -> None:
    """The machine costs money all the while."""
    meter, clock = a_meter()
    clock.now = 50
    assert meter.report() == {}
    meter.add("a")
    clock.now = 60
    assert meter.report() == {"a": ComputeTimes(60, 60, 0, 0)}


def test_what_a_model_that_went_had_for_requests_is_lost_in_its_last_report() -> None:
    """Nobody takes it any more."""
    meter, clock = a_meter("m", "other")
    run_step(meter, clock, 100, a=1)
    meter.retire("m")
    assert meter.report()["m"] == ComputeTimes(100, 0, 0, 100)
    assert meter.take("m", "a") == 0
