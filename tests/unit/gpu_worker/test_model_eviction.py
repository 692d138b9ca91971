"""Who is loaded: never beyond the budget, never closed early; everybody's turn comes."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.engine import DoesNotFit
from gpu_worker.models.model_eviction import (
    EvictionPlanner,
    compute_budget,
    divide_budget,
    estimate_needed_bytes,
)

NEEDS = st.lists(st.integers(1, 50), min_size=1, max_size=5)


@dataclass
class Worker:
    """A worker without engines: it does what is decided, and its requests last for a while."""

    books: EvictionPlanner
    ends: dict[str, list[float]] = field(default_factory=dict)  # of what runs
    queued: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # since, seconds
    since: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0

    def step(self, now: float) -> None:
        for name in self.books.shares:
            self.ends[name] = [end for end in self.ends.get(name, []) if end > now]
        absent = self.queued.keys() - self.books.loaded  # who leaves does not pull what is queued
        busy = {n for n in self.books.shares if self.ends[n] or n in absent}
        self.books.observe(busy, now)
        decision = self.books.decide(now)
        assert decision.draining <= self.books.loaded
        if decision.load:
            self.books.mark_loading(decision.load, now)
            self.books.mark_ready(decision.load, now)
            self.since[decision.load] = now
        if decision.evict:
            assert not self.ends[decision.evict], "closed at work"
            assert now - self.since[decision.evict] >= self.books.min_residency_seconds, (
                "closed early"
            )
            self.books.mark_closed(decision.evict)
        assert self.books.free_bytes >= 0, "over budget"
        for name in self.books.loaded - decision.draining:
            self._begin(name, now)

    def _begin(self, name: str, now: float) -> None:
        for since, seconds in self.queued.pop(name, []):
            self.waited = max(self.waited, now - since)
            self.ends[name].append(now + seconds)


def _plan(least: list[int], budget: int) -> dict[str, int]:
    return divide_budget(budget, {f"m{n}": need for n, need in enumerate(least)})


@given(NEEDS, st.integers(0, 100))
def test_a_share_is_enough_and_as_many_as_possible_fit_together(
    least: list[int], more: int
) -> None:
    """Any of them, in whatever company: or the memory would depend on who came first."""
    budget = max(least) + more
    made = _plan(least, budget)
    together = 0
    for need in sorted(least, reverse=True):
        budget -= need
        if budget < 0:
            break
        together += 1
    largest = sorted(made.values(), reverse=True)[:together]
    assert sum(largest) <= max(least) + more
    assert all(made[f"m{n}"] >= need for n, need in enumerate(least))


def test_models_that_fit_together_share_all_of_the_budget() -> None:
    """KV is worth having, and nobody else may take it."""
    assert divide_budget(100, {"a": 10, "b": 30}) == {"a": 40, "b": 60}


def test_models_that_take_turns_leave_nothing_unused() -> None:
    """Two of three fit at a time."""
    assert divide_budget(100, {"a": 40, "b": 40, "c": 40}) == {"a": 50, "b": 50, "c": 50}


def test_a_model_without_weights_needs_no_share() -> None:
    """A mock or a remote engine takes nothing from the others."""
    assert divide_budget(100, {"a": 40, "remote": 0}) == {"a": 100, "remote": 0}


def test_a_model_that_is_too_large_alone_is_refused_with_numbers() -> None:
    """At start-up, where an operator sees it, not with its first request."""
    with pytest.raises(DoesNotFit, match="big needs 1,250 bytes .* may take 1,000"):
        divide_budget(1000, {"small": 10, "big": estimate_needed_bytes(1000)})


def test_without_a_setting_all_that_fit_are_loaded_and_kv_takes_its_part_of_the_rest() -> None:
    """The machine is not ours alone; weights are not a matter of share."""
    assert compute_budget(100, [20, 40], 0.25) == 70
    assert compute_budget(50, [20, 40], 0.25) == 50


@given(
    NEEDS,
    st.integers(0, 60),
    st.integers(0, 10),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60), st.integers(1, 20)), max_size=40),
)
def test_all_work_begins_within_the_turns_of_the_others(
    least: list[int], more: int, minimum: int, arrivals: list[tuple[int, int, int]]
) -> None:
    """Not over budget, none closed early or at work (the worker asserts it), and nobody starves."""
    made = _plan(least, max(least) + more)
    worker = Worker(EvictionPlanner(max(least) + more, made, minimum))
    due = sorted((at, f"m{number % len(least)}", lasts) for number, at, lasts in arrivals)
    for now in range(1000):
        while due and due[0][0] <= now:
            at, name, lasts = due.pop(0)
            worker.queued.setdefault(name, []).append((at, lasts))
        worker.step(now)
    assert not any(worker.queued.values())
    turn = minimum + 20 + 2 * len(least)  # residency, the longest request, closing one by one
    assert worker.waited <= turn * len(least)


def test_a_busy_model_gives_way_after_its_minimum_time() -> None:
    """Requests that never stop must not keep another model out for ever."""
    books = EvictionPlanner(10, {"a": 10, "b": 10}, min_residency_seconds=5)
    books.mark_loading("a", 0)
    books.mark_ready("a", 1)
    books.observe({"a", "b"}, 2)
    early, late = books.decide(2), books.decide(6)
    assert (early.draining, early.next_check_at) == (frozenset(), 6)
    assert (late.draining, late.evict) == (frozenset({"a"}), None)
    books.observe({"b"}, 7)
    assert books.decide(7).evict == "a"


def test_an_idle_model_is_closed_before_a_busy_one_and_the_longest_idle_first() -> None:
    """The least is lost that way."""
    books = EvictionPlanner(30, dict.fromkeys("abcd", 10), min_residency_seconds=0)
    for at, name in enumerate("abc"):
        books.mark_loading(name, at)
    books.observe({"a", "b"}, 5)
    books.observe({"a"}, 6)
    books.observe({"a", "d"}, 7)
    assert books.decide(7).evict == "c"
    books.mark_closed("c")
    assert books.decide(7).load == "d"


def test_a_model_whose_work_has_gone_gives_up_its_place_in_line() -> None:
    """Cancelled or expired: nobody is closed for it."""
    books = EvictionPlanner(10, {"a": 10, "b": 10}, min_residency_seconds=0)
    books.mark_loading("a", 0)
    books.observe({"b"}, 1)
    assert books.decide(1).evict == "a"
    books.observe(set(), 2)
    assert books.decide(2).draining == frozenset()


def loaded(taken: dict[str, int], load_seconds: dict[str, int]) -> EvictionPlanner:
    """Models that are loaded at once and idle, with what their loads took."""
    books = EvictionPlanner(sum(taken.values()), {**taken, "new": 10}, min_residency_seconds=0)
    for name in taken:
        books.mark_loading(name, 0)
    for name in taken:
        books.mark_ready(name, load_seconds[name])
    return books


def test_as_few_models_as_possible_are_evicted() -> None:
    """One large one, although two small ones would be enough and were used less."""
    books = loaded({"a": 5, "b": 5, "large": 12}, dict.fromkeys(("a", "b", "large"), 1))
    books.observe({"large"}, 10)
    books.observe({"new"}, 20)
    assert books.decide(20).draining == {"large"}


def test_the_model_that_costs_least_to_have_back_is_evicted() -> None:
    """Used half as much and four times as slow to load: not the least recently used one."""
    books = loaded({"slow": 10, "quick": 10}, {"slow": 40, "quick": 10})
    for at in range(100, 400, 20):
        books.observe({"quick"}, at)
        books.observe({"slow", "quick"}, at + 10)
    books.observe({"quick"}, 400)  # used last
    books.observe({"new"}, 401)
    assert books.decide(401).evict == "quick"


def test_a_model_that_comes_is_loaded_beside_the_others_with_what_it_needs() -> None:
    """Less than its share: the others keep what they took while they were alone."""
    books = EvictionPlanner(100, {"a": 70}, 10, {"a": 40})
    assert books.mark_loading("a", 0) == 70
    books.mark_ready("a", 1)
    books.plan(100, {"a": 60, "b": 50}, {"a": 40, "b": 25})
    assert books.fits("b")
    assert books.mark_loading("b", 2) == 30
    assert books.free_bytes == 0
    books.plan(100, {"a": 50, "b": 50, "c": 50}, dict.fromkeys("abc", 40))
    assert not books.fits("c")


def test_what_was_loaded_without_a_share_is_counted_later() -> None:
    """The only model of a worker takes what it finds; a second one must not find it free."""
    books = EvictionPlanner(0, {"a": 0}, 10)
    books.mark_loading("a", 0)
    books.set_taken("a", 80)
    books.plan(100, {"a": 50, "b": 50}, {"a": 30, "b": 30})
    assert (books.free_bytes, books.fits("b")) == (20, False)
