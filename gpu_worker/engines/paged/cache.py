"""The KV of all runs: a pool of blocks for each window that layers see, shared by equal prefixes.

Layers that see everything keep all blocks of a run. For layers that see a window, the blocks that
lie wholly before it are given back, and stay cached for others while nobody needs their place.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from gpu_worker.engines.paged.blocks import BLOCK_TOKENS, TRASH, Blocks, blocks_for
from gpu_worker.engines.paged.run import Run, Table, Window, first_seen
from streams.marks import is_position


def pool_sizes(
    windows: Iterable[Window], tokens: int, max_sequences: int, max_batch_tokens: int
) -> dict[Window, int]:
    """Blocks of each pool for runs of so many `tokens` together.

    Behind a window no more than `max_sequences` can hold; what they do not is for prefixes.
    """
    whole = blocks_for(tokens)
    return {
        window: whole
        if window is None
        else min(whole, _most(window, max_sequences, max_batch_tokens))
        for window in windows
    }


class Cache:
    """Pools of `sizes` blocks; a step adds at most `max_batch_tokens` to a run.

    A run has tables from `restore` until `release` or `discard`.
    """

    def __init__(
        self, sizes: Mapping[Window, int], max_batch_tokens: int, prefix_cache: bool = True
    ) -> None:
        self.pools = {window: Blocks(count) for window, count in sizes.items()}
        self._most = {w: _most(w, 1, max_batch_tokens) for w in sizes if w is not None}
        self._prefix_cache = prefix_cache
        self._unclean: dict[Window, list[int]] = {}

    def restore(self, run: Run) -> None:
        """Share what is cached of a run's start; the last token is left to compute."""
        count = self._cached(run) if self._prefix_cache else 0
        run.published, run.done = count, count * BLOCK_TOKENS
        for window, pool in self.pools.items():
            first = first_seen(run.done, window) // BLOCK_TOKENS
            shared = [pool.hit(run.digest(index)) for index in range(first, count)]
            run.tables[window] = Table([TRASH] * first + shared, first)

    def fits(self, run: Run, tokens: int, without: Sequence[Run] = ()) -> bool:
        """Whether a run could grow to `tokens`, if all those `without` released theirs."""
        for window, pool in self.pools.items():
            lack = self._lack(run, tokens, window) - pool.available
            if lack > 0 and lack > pool.freed_by(other.tables[window].held for other in without):
                return False
        return True

    def grow(self, run: Run, tokens: int) -> None:
        """Give a run what it needs for `tokens`. The caller has checked `fits`."""
        for window, table in run.tables.items():
            lack = blocks_for(tokens) - len(table.blocks)
            if lack > 0:
                taken = self.pools[window].take(lack)
                table.blocks += taken
                if window is not None:
                    self._clean(window, taken)

    def commit(self, run: Run) -> None:
        """The KV of `run.done` tokens is in place: share it, and give back what is seen no more."""
        if self._prefix_cache:
            self._publish(run)
        for window, table in run.tables.items():
            first = first_seen(run.done, window) // BLOCK_TOKENS
            if first > table.first:
                self.pools[window].release(table.blocks[table.first : first])
                table.blocks[table.first : first] = [TRASH] * (first - table.first)
                table.first = first

    def release(self, run: Run) -> None:
        """Take everything from a run; it may be restored later. Idempotent."""
        for window, table in run.tables.items():
            self.pools[window].release(table.held)
        run.tables, run.done, run.published = {}, 0, 0

    def discard(self, run: Run) -> None:
        """Take everything from a run whose KV may be bad, and share it no more."""
        for window, table in run.tables.items():
            self._clean(window, self.pools[window].discard(table.held))
        run.tables = {}

    def unclean(self) -> dict[Window, list[int]]:
        """Blocks to be zeroed before the next step is computed; asking again names others.

        What slides out of a window is given back before it is known whether its run is sound, and
        a NaN would reach the next owner, even masked. So such blocks are cleaned when taken; those
        of pools without a window when their run was found to be bad.
        """
        unclean, self._unclean = self._unclean, {}
        return unclean

    def forget(self) -> None:
        """Empty the prefix cache."""
        for pool in self.pools.values():
            pool.forget()

    def marks(self) -> list[int]:
        """Of the prefixes that are cached where all is seen, or else in the widest window."""
        widest = max(self.pools, key=lambda window: inf if window is None else window)
        return list(self.pools[widest].marks)

    @property
    def count(self) -> int:
        """Blocks of all pools; `available` and `cached` are parts of it."""
        return sum(pool.count for pool in self.pools.values())

    @property
    def available(self) -> int:
        return sum(pool.available for pool in self.pools.values())

    @property
    def cached(self) -> int:
        return sum(pool.cached for pool in self.pools.values())

    def _lack(self, run: Run, tokens: int, window: Window) -> int:
        """Blocks that a run needs beside its own on the way to `tokens`, at most at a time."""
        lack = blocks_for(tokens) - len(run.tables[window].blocks)
        return lack if window is None else min(lack, self._most[window])

    def _cached(self, run: Run) -> int:
        """The longest prefix, in blocks, of which each pool still has what the next token sees."""
        longest = 0
        missing = dict.fromkeys(self.pools, -1)  # the last block that is not there
        for index in range((len(run.tokens) - 1) // BLOCK_TOKENS):
            missing |= {w: index for w, p in self.pools.items() if not p.has(run.digest(index))}
            if missing.get(None, -1) >= 0:
                break
            end = (index + 1) * BLOCK_TOKENS
            if all(last < first_seen(end, w) // BLOCK_TOKENS for w, last in missing.items()):
                longest = index + 1
        return longest

    def _publish(self, run: Run) -> None:
        whole = range(run.published, run.done // BLOCK_TOKENS)
        for index in whole:
            for window, table in run.tables.items():
                marked = is_position((index + 1) * BLOCK_TOKENS)
                self.pools[window].publish(table.blocks[index], run.digest(index), marked=marked)
        run.published = whole.stop

    def _clean(self, window: Window, blocks: list[int]) -> None:
        if blocks:
            self._unclean.setdefault(window, []).extend(blocks)


def _most(window: int, sequences: int, tokens: int) -> int:
    """Blocks that so many sequences hold behind a window while a step adds `tokens` to them."""
    return sequences * (blocks_for(window) + 2) + blocks_for(tokens)
