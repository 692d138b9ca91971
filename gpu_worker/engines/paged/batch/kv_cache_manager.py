"""Allocation of KV blocks to sequences: a block pool for each window, shared by equal prefixes.

Layers that see everything keep all blocks of a sequence. For layers with a sliding window, blocks
that lie wholly before it are released; they stay cached for other sequences until evicted.
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
    """Return the number of blocks of each window's pool for a KV cache of `tokens` tokens.

    The pool without a window gets blocks for all of them. The pool of a sliding window gets no more
    than `max_sequences` sequences can hold with `max_batch_tokens` new tokens; those of its blocks
    that are not in use cache prefixes.
    """
    full_blocks = blocks_for(tokens)
    return {
        window: full_blocks
        if window is None
        else min(full_blocks, _window_blocks(window, max_sequences, max_batch_tokens))
        for window in windows
    }


class KvCacheManager:
    """Allocates KV blocks to sequences, from one pool of blocks for each sliding window.

    `sizes` is the number of blocks by window. A step adds at most `max_batch_tokens` tokens to a
    sequence. A sequence has block tables from `share_prefix` until `release` or `discard`. With
    `prefix_cache` False no blocks are shared.
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

    def share_prefix(self, state: SequenceState) -> None:
        """Give a sequence block tables that begin with the longest cached prefix of its tokens.

        Sets `computed_tokens` to that prefix's length, which is 0 if nothing is cached. The last
        token is never taken from the cache, because it must be computed to sample the next one.
        """
        count = self._longest_cached_prefix(state) if self._prefix_cache else 0
        state.published_blocks, state.computed_tokens = count, count * BLOCK_TOKENS
        for window, pool in self.pools.items():
            first = first_visible_position(state.computed_tokens, window) // BLOCK_TOKENS
            shared = [pool.share(state.digest_block(index)) for index in range(first, count)]
            state.block_tables[window] = BlockTable([NULL_BLOCK] * first + shared, first)

    def can_grow(
        self, state: SequenceState, tokens: int, preempting: Sequence[SequenceState] = ()
    ) -> bool:
        """Return whether there are blocks for a sequence to have `tokens` tokens in all.

        Blocks that would become available if all sequences in `preempting` released theirs count as
        available. Changes nothing.
        """
        for window, pool in self.pools.items():
            missing_blocks = self._missing_blocks(state, tokens, window) - pool.available
            if missing_blocks > 0 and missing_blocks > pool.count_freed_by(
                other.block_tables[window].held_blocks for other in preempting
            ):
                return False
        return True

    def grow(self, state: SequenceState, tokens: int) -> None:
        """Allocate the blocks that a sequence lacks to have `tokens` tokens in all.

        The caller must have checked `can_grow`; a `KeyError` means that there were too few blocks.
        """
        for window, table in state.block_tables.items():
            missing_blocks = blocks_for(tokens) - len(table.blocks)
            if missing_blocks > 0:
                allocated = self.pools[window].allocate(missing_blocks)
                table.blocks += allocated
                if window is not None:
                    self._mark_for_zeroing(window, allocated)

    def commit(self, state: SequenceState) -> None:
        """Publish a sequence's full blocks, and release those that its windows have moved past.

        The caller must have raised `state.computed_tokens` to what a step has computed. Published
        blocks can be shared by other sequences; without a prefix cache none is published.
        """
        if self._prefix_cache:
            self._publish(state)
        for window, table in state.block_tables.items():
            first = first_visible_position(state.computed_tokens, window) // BLOCK_TOKENS
            if first > table.first_held:
                self.pools[window].release(table.blocks[table.first_held : first])
                table.blocks[table.first_held : first] = [NULL_BLOCK] * (first - table.first_held)
                table.first_held = first

    def release(self, state: SequenceState) -> None:
        """Release all blocks of a sequence, which then has no computed tokens. Idempotent.

        Published blocks stay cached. `share_prefix` may be called for the sequence again.
        """
        for window, table in state.block_tables.items():
            self.pools[window].release(table.held_blocks)
        state.block_tables, state.computed_tokens, state.published_blocks = {}, 0, 0

    def discard(self, state: SequenceState) -> None:
        """Release all blocks of a sequence whose KV may be bad; no other sequence will share them.

        Blocks that nobody else references are zeroed before the next step; see
        `pop_blocks_to_zero`.
        """
        for window, table in state.block_tables.items():
            self._mark_for_zeroing(window, self.pools[window].discard(table.held_blocks))
        state.block_tables = {}

    def pop_blocks_to_zero(self) -> dict[SlidingWindow, list[int]]:
        """Return, once, the blocks by window that the caller must zero before the next step.

        Blocks of sliding windows are zeroed when they are allocated, since such a block is released
        before it is known whether its sequence's KV is sound. Blocks of the pool without a window
        are zeroed when their sequence is discarded. A NaN left in a block would reach the next
        owner even where it is masked.
        """
        to_zero, self._blocks_to_zero = self._blocks_to_zero, {}
        return to_zero

    def reset_prefix_cache(self) -> None:
        """Evict the cached blocks of all pools; blocks that a sequence references stay."""
        for pool in self.pools.values():
            pool.reset_prefix_cache()

    def prefix_hashes(self) -> list[int]:
        """Return the hashes of cached prefixes, least recently used first.

        `streams/prefix_hashes.py` defines them. They are those of the pool without a window, or of
        the widest window's pool if all have one.
        """
        widest = max(self.pools, key=lambda window: inf if window is None else window)
        return list(self.pools[widest].prefix_hashes)

    @property
    def total_blocks(self) -> int:
        """The number of blocks of all pools together, in use or not."""
        return sum(pool.count for pool in self.pools.values())

    @property
    def available_blocks(self) -> int:
        """The number of blocks of all pools that can be allocated: free ones and cached ones."""
        return sum(pool.available for pool in self.pools.values())

    @property
    def cached_blocks(self) -> int:
        """The number of blocks of all pools that only the prefix cache holds."""
        return sum(pool.cached for pool in self.pools.values())

    def _missing_blocks(self, state: SequenceState, tokens: int, window: SlidingWindow) -> int:
        """Return the most blocks beside its own that a sequence ever needs to reach `tokens`."""
        missing_blocks = blocks_for(tokens) - len(state.block_tables[window].blocks)
        return (
            missing_blocks
            if window is None
            else min(missing_blocks, self._max_window_blocks[window])
        )

    def _longest_cached_prefix(self, state: SequenceState) -> int:
        """Return the longest prefix, in blocks, whose visible blocks every pool still has cached.

        Visible are those that the token behind the prefix attends to in the pool's window.
        """
        longest = 0
        last_missing = dict.fromkeys(self.pools, -1)  # by window, the last block not cached
        for index in range((len(state.tokens) - 1) // BLOCK_TOKENS):
            last_missing |= {
                w: index
                for w, p in self.pools.items()
                if not p.is_published(state.digest_block(index))
            }
            if last_missing.get(None, -1) >= 0:
                break
            end = (index + 1) * BLOCK_TOKENS
            if all(
                missing_index < first_visible_position(end, w) // BLOCK_TOKENS
                for w, missing_index in last_missing.items()
            ):
                longest = index + 1
        return longest

    def _publish(self, state: SequenceState) -> None:
        full_blocks = range(state.published_blocks, state.computed_tokens // BLOCK_TOKENS)
        for index in full_blocks:
            for window, table in state.block_tables.items():
                advertise = is_hash_position((index + 1) * BLOCK_TOKENS)
                self.pools[window].publish(
                    table.blocks[index], state.digest_block(index), advertise=advertise
                )
        state.published_blocks = full_blocks.stop

    def _mark_for_zeroing(self, window: SlidingWindow, blocks: list[int]) -> None:
        if blocks:
            self._blocks_to_zero.setdefault(window, []).extend(blocks)


def _window_blocks(window: int, sequences: int, tokens: int) -> int:
    """Return how many blocks `sequences` hold in a window's pool while a step adds `tokens`."""
    return sequences * (blocks_for(window) + 2) + blocks_for(tokens)
