"""What workers tell of their caches, and what a dispatcher makes of it."""

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.workers.prefix_index import PrefixIndex
from gpu_worker.engines.simulated_prefix_cache import SimulatedPrefixCache
from gpu_worker.pool.cache_report import (
    FULL_REPORT_SECONDS,
    MAX_HASHES,
    REPORT_SECONDS,
    CacheReporter,
)
from streams.messages import Heartbeat

MARKS = st.integers(0, 2**64 - 1)
HELD = st.lists(st.sets(st.integers(0, 9)), max_size=20)


def hear(holders: PrefixIndex, holdings: CacheReporter, held: list[int], now: float) -> None:
    told = holdings.report(held, now)
    holders.apply_heartbeat(Heartbeat("w", "m", "1", 4, 100, 0, 0, 4, 100, 0, 0.0, **asdict(told)))


def known(holders: PrefixIndex) -> set[int]:
    return {mark for mark in range(10) if "w" in holders.workers_with(mark)}


@given(HELD)
def test_changes_add_up_to_what_is_held(steps: list[set[int]]) -> None:
    """Beats tell changes alone, since all of it would be too much for each."""
    holders, holdings = PrefixIndex(), CacheReporter()
    for number, held in enumerate(steps):
        hear(holders, holdings, list(held), number * REPORT_SECONDS)
        assert known(holders) == held


@given(HELD, st.sets(st.integers(0, 9)))
def test_what_a_lost_beat_told_is_told_again(lost: list[set[int]], last: set[int]) -> None:
    """Beats are at most once; what is wrong does not stay wrong."""
    holders, holdings = PrefixIndex(), CacheReporter()
    hear(holders, holdings, [1, 2, 3], 0.0)
    for held in lost:
        holdings.report(list(held), 1.0)
    hear(holders, holdings, list(last), FULL_REPORT_SECONDS)
    assert known(holders) == last


def test_a_new_leader_is_told_everything_at_once() -> None:
    """It asks for a beat, and knows nothing of what earlier ones told."""
    holdings = CacheReporter()
    holdings.report([1, 2, 3], 0.0)
    holdings.reset()
    assert holdings.is_due(0.0)
    holders = PrefixIndex()
    hear(holders, holdings, [1, 2, 3], 0.0)
    assert known(holders) == {1, 2, 3}


def test_the_most_recently_used_are_told() -> None:
    """A beat is bounded, however large a cache is."""
    holders, holdings = PrefixIndex(), CacheReporter()
    hear(holders, holdings, list(range(MAX_HASHES + 3)), 0.0)
    assert known(holders) == set(range(3, 10))


def test_what_is_placed_on_a_worker_is_expected_there_until_it_is_gone() -> None:
    """Two requests with one start follow each other faster than beats tell of the first."""
    holders = PrefixIndex()
    holders.expect("w", [1, 2])
    holders.expect("v", [2])
    assert (list(holders.workers_with(1)), list(holders.workers_with(2))) == (["w"], ["w", "v"])
    holders.remove_worker("w")
    assert (list(holders.workers_with(1)), list(holders.workers_with(2))) == ([], ["v"])


def test_a_memory_of_prompts_forgets_the_least_recently_used() -> None:
    """As an engine's cache: the end of the oldest prompt goes first, its start with the last."""
    memory = SimulatedPrefixCache(tokens=260)
    memory.insert([1, 2, 3])  # 64, 96, 128 tokens
    memory.insert([1, 4, 5])
    assert (memory.match_prefix([1, 2, 3]), memory.match_prefix([1, 4, 5, 6])) == (128, 128)
    memory.insert([7, 8, 9])
    assert (
        memory.match_prefix([1, 4, 5]),
        memory.match_prefix([1, 2, 3]),
        memory.match_prefix([7, 8]),
    ) == (128, 64, 96)
