"""Each window's layers keep what they see; a prefix is shared where all of them still have it."""

import pytest

from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS
from gpu_worker.engines.paged.batch.kv_cache_manager import KvCacheManager, pool_sizes
from gpu_worker.engines.paged.batch.sequence_state import SequenceState

WINDOW, CHUNK, BLOCKS = 20, 32, 64
TOKENS = list(range(100))


def _cache(*windows: int | None) -> KvCacheManager:
    return KvCacheManager(dict.fromkeys(windows, BLOCKS), CHUNK)


def _computed(cache: KvCacheManager, tokens: list[int]) -> SequenceState:
    """A run whose tokens have been computed in chunks."""
    run = SequenceState("r", tokens)
    cache.share_prefix(run)
    while run.pending_tokens:
        chunk = min(CHUNK, run.pending_tokens)
        assert cache.can_grow(run, run.computed_tokens + chunk)
        cache.grow(run, run.computed_tokens + chunk)
        run.computed_tokens += chunk
        cache.commit(run)
    return run


def _held(cache: KvCacheManager) -> dict[int | None, int]:
    return {window: pool.count - pool.available for window, pool in cache.pools.items()}


def test_a_run_keeps_all_blocks_or_those_of_its_window() -> None:
    """Position 100 sees 81 to 100: blocks 5 and 6 of 7."""
    cache = _cache(None, WINDOW)
    run = _computed(cache, TOKENS)
    assert _held(cache) == {None: 7, WINDOW: 2}
    cache.release(run)
    cache.release(run)
    assert _held(cache) == {None: 0, WINDOW: 0}


def test_a_prefix_needs_all_blocks_of_one_pool_and_the_last_of_the_other() -> None:
    """What lies before the window is read by nobody."""
    cache = _cache(None, WINDOW)
    cache.release(_computed(cache, TOKENS))
    run = SequenceState("again", [*TOKENS, 7])
    cache.share_prefix(run)
    assert run.computed_tokens == 96
    assert _held(cache) == {None: 6, WINDOW: 2}
    assert run.block_tables[WINDOW].blocks[:4] == [0] * 4


@pytest.mark.parametrize("windows", [(None, WINDOW), (WINDOW,)])
def test_a_prefix_ends_where_its_window_is_still_there(windows: tuple[int | None, ...]) -> None:
    """Blocks 2 to 4 have been evicted: 5 alone is not enough, and 0 and 1 still are."""
    cache = _cache(*windows)
    run = _computed(cache, TOKENS)
    cache.release(run)
    pool = cache.pools[WINDOW]
    evicted = [pool.share(run.digest_block(index)) for index in range(2, 5)]
    pool.discard(evicted)
    again = SequenceState("again", TOKENS)
    cache.share_prefix(again)
    assert again.computed_tokens == 2 * BLOCK_TOKENS


def test_a_gap_before_the_window_spoils_nothing_without_a_full_layer() -> None:
    """Mistral's layers all see the same window."""
    cache = _cache(WINDOW)
    run = _computed(cache, TOKENS)
    cache.release(run)
    pool = cache.pools[WINDOW]
    pool.discard([pool.share(run.digest_block(index)) for index in range(2)])
    again = SequenceState("again", TOKENS)
    cache.share_prefix(again)
    assert again.computed_tokens == 96


def test_blocks_to_be_cleaned_are_named_once() -> None:
    """Behind a window when they are taken, as their last owner may be bad; else when it is."""
    cache = _cache(None, WINDOW)
    run = _computed(cache, TOKENS)
    held = run.block_tables[None].held_blocks
    assert set(cache.pop_blocks_to_zero()) == {WINDOW}
    cache.discard(run)
    assert cache.pop_blocks_to_zero()[None] == held
    assert cache.pop_blocks_to_zero() == {}


def test_a_long_run_fits_behind_its_window() -> None:
    """A pool smaller than a context takes a run of any length, chunk by chunk."""
    sizes = pool_sizes([None, WINDOW], 10_000, max_sequences=1, max_batch_tokens=CHUNK)
    assert sizes == {None: 625, WINDOW: 2 + 2 + 2}
    cache = KvCacheManager(sizes, CHUNK)
    run = SequenceState("long", [1] * 9_999)
    cache.share_prefix(run)
    assert cache.can_grow(run, 10_000)
    cache.release(run)
    _computed(cache, [1] * 9_999)


def test_a_pool_behind_a_window_is_never_larger_than_the_tokens() -> None:
    """Short contexts never slide."""
    assert pool_sizes([None, 4096], 512, 64, 512) == {None: 32, 4096: 32}
