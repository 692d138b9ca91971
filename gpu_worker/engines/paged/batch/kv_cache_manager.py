"""The KV of all runs: a pool of blocks for each window that layers see, shared by equal prefixes.

Layers that see everything keep all blocks of a run. For layers that see a window, the blocks that
lie wholly before it are given back, and stay cached for others while nobody needs their place.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from gpu_worker.engines.paged.batch.block_pool import (
    BLOCK_TOKENS,
    NULL_BLOCK,
    BlockPool,
    blocks_for,
)
from gpu_worker.engines.paged.batch.sequence_state import (
    BlockTable,
    SequenceState,
    SlidingWindow,
    first_visible_position,
)
from streams.prefix_hashes import is_hash_position


def pool_sizes(
    windows: Iterable[SlidingWindow], tokens: int, max_sequences: int, max_batch_tokens: int
) -> dict[SlidingWindow, int]:
    """Blocks of each pool for runs of so many `tokens` together.

    Behind a window no more than `max_sequences` can hold; what they do not is for prefixes.
    """
    whole = blocks_for(tokens)
    return {
        window: whole
        if window is None
        else min(whole, _window_blocks(window, max_sequences, max_batch_tokens))
        for window in windows
    }


class KvCacheManager:
    """Pools of `sizes` blocks; a step adds at most `max_batch_tokens` to a run.

    A run has tables from `restore` until `release` or `discard`.
    """

    def __init__(
        self, sizes: Mapping[SlidingWindow, int], max_batch_tokens: int, prefix_cache: bool = True
    ) -> None:
        self.pools = {window: BlockPool(count) for window, count in sizes.items()}
        self._max_window_blocks = {
            w: _window_blocks(w, 1, max_batch_tokens) for w in sizes if w is not None
        }
        self._prefix_cache = prefix_cache
        self._blocks_to_zero: dict[SlidingWindow, list[int]] = {}

    def share_prefix(self, run: SequenceState) -> None:
        """Share what is cached of a run's start; the last token is left to compute."""
        count = self._longest_cached_prefix(run) if self._prefix_cache else 0
        run.published_blocks, run.computed_tokens = count, count * BLOCK_TOKENS
        for window, pool in self.pools.items():
            first = first_visible_position(run.computed_tokens, window) // BLOCK_TOKENS
            shared = [pool.share(run.digest_block(index)) for index in range(first, count)]
            run.block_tables[window] = BlockTable([NULL_BLOCK] * first + shared, first)

    def can_grow(
        self, run: SequenceState, tokens: int, without: Sequence[SequenceState] = ()
    ) -> bool:
        """Whether a run could grow to `tokens`, if all those `without` released theirs."""
        for window, pool in self.pools.items():
            lack = self._missing_blocks(run, tokens, window) - pool.available
            if lack > 0 and lack > pool.count_freed_by(
                other.block_tables[window].held_blocks for other in without
            ):
                return False
        return True

    def grow(self, run: SequenceState, tokens: int) -> None:
        """Give a run what it needs for `tokens`. The caller has checked `fits`."""
        for window, table in run.block_tables.items():
            lack = blocks_for(tokens) - len(table.blocks)
            if lack > 0:
                taken = self.pools[window].allocate(lack)
                table.blocks += taken
                if window is not None:
                    self._zero_later(window, taken)

    def commit(self, run: SequenceState) -> None:
        """The KV of `run.done` tokens is in place: share it, and give back what is seen no more."""
        if self._prefix_cache:
            self._publish(run)
        for window, table in run.block_tables.items():
            first = first_visible_position(run.computed_tokens, window) // BLOCK_TOKENS
            if first > table.first_held:
                self.pools[window].release(table.blocks[table.first_held : first])
                table.blocks[table.first_held : first] = [NULL_BLOCK] * (first - table.first_held)
                table.first_held = first

    def release(self, run: SequenceState) -> None:
        """Take everything from a run; it may be restored later. Idempotent."""
        for window, table in run.block_tables.items():
            self.pools[window].release(table.held_blocks)
        run.block_tables, run.computed_tokens, run.published_blocks = {}, 0, 0

    def discard(self, run: SequenceState) -> None:
        """Take everything from a run whose KV may be bad, and share it no more."""
        for window, table in run.block_tables.items():
            self._zero_later(window, self.pools[window].discard(table.held_blocks))
        run.block_tables = {}

    def pop_blocks_to_zero(self) -> dict[SlidingWindow, list[int]]:
        """Blocks to be zeroed before the next step is computed; asking again names others.

        What slides out of a window is given back before it is known whether its run is sound, and
        a NaN would reach the next owner, even masked. So such blocks are cleaned when taken; those
        of pools without a window when their run was found to be bad.
        """
        unclean, self._blocks_to_zero = self._blocks_to_zero, {}
        return unclean

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        for pool in self.pools.values():
            pool.reset_prefix_cache()

    def prefix_hashes(self) -> list[int]:
        """Of the prefixes that are cached where all is seen, or else in the widest window."""
        widest = max(self.pools, key=lambda window: inf if window is None else window)
        return list(self.pools[widest].prefix_hashes)

    @property
    def total_blocks(self) -> int:
        """Blocks of all pools; `available` and `cached` are parts of it."""
        return sum(pool.count for pool in self.pools.values())

    @property
    def available_blocks(self) -> int:
        return sum(pool.available for pool in self.pools.values())

    @property
    def cached_blocks(self) -> int:
        return sum(pool.cached for pool in self.pools.values())

    def _missing_blocks(self, run: SequenceState, tokens: int, window: SlidingWindow) -> int:
        """Blocks that a run needs beside its own on the way to `tokens`, at most at a time."""
        lack = blocks_for(tokens) - len(run.block_tables[window].blocks)
        return lack if window is None else min(lack, self._max_window_blocks[window])

    def _longest_cached_prefix(self, run: SequenceState) -> int:
        """The longest prefix, in blocks, of which each pool still has what the next token sees."""
        longest = 0
        missing = dict.fromkeys(self.pools, -1)  # the last block that is not there
        for index in range((len(run.tokens) - 1) // BLOCK_TOKENS):
            missing |= {
                w: index
                for w, p in self.pools.items()
                if not p.is_published(run.digest_block(index))
            }
            if missing.get(None, -1) >= 0:
                break
            end = (index + 1) * BLOCK_TOKENS
            if all(
                last < first_visible_position(end, w) // BLOCK_TOKENS for w, last in missing.items()
            ):
                longest = index + 1
        return longest

    def _publish(self, run: SequenceState) -> None:
        whole = range(run.published_blocks, run.computed_tokens // BLOCK_TOKENS)
        for index in whole:
            for window, table in run.block_tables.items():
                marked = is_hash_position((index + 1) * BLOCK_TOKENS)
                self.pools[window].publish(
                    table.blocks[index], run.digest_block(index), marked=marked
                )
        run.published_blocks = whole.stop

    def _zero_later(self, window: SlidingWindow, blocks: list[int]) -> None:
        if blocks:
            self._blocks_to_zero.setdefault(window, []).extend(blocks)


def _window_blocks(window: int, sequences: int, tokens: int) -> int:
    """Blocks that so many sequences hold behind a window while a step adds `tokens` to them."""
    return sequences * (blocks_for(window) + 2) + blocks_for(tokens)
