"""Simulates which prompt prefixes an engine with a KV cache of a given size would hold. Pure."""

from collections.abc import Sequence
from itertools import islice, pairwise, takewhile

from streams import prefix_hashes


class SimulatedPrefixCache:
    """An LRU cache of prompt prefixes with room for `tokens` tokens, which stores hashes alone.

    A prompt is given as the hashes of its prefixes, shortest first (`streams/prefix_hashes.py`).
    """

    def __init__(self, tokens: int) -> None:
        self._tokens, self._used = tokens, 0
        self._tokens_by_hash: dict[
            int, int
        ] = {}  # tokens between a prefix and the next shorter one

    def match_prefix(self, prompt: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt are cached, and mark their prefixes as used.

        `prompt` is given as the hashes of its prefixes. 0 means that none is cached.
        """
        there = list(takewhile(self._tokens_by_hash.__contains__, prompt))
        self._touch(there)
        return sum(self._tokens_by_hash[mark] for mark in there)

    def insert(self, prompt: Sequence[int]) -> None:
        """Add all prefixes of a prompt, and evict the least recently used beyond the cache's size.

        `prompt` is given as the hashes of its prefixes.
        """
        lengths = [0, *islice(prefix_hashes.hash_positions(1 << 40), len(prompt))]
        for mark, (before, length) in zip(prompt, pairwise(lengths), strict=True):
            if mark not in self._tokens_by_hash:
                self._tokens_by_hash[mark] = length - before
                self._used += length - before
        self._touch(prompt)
        while self._used > self._tokens:
            oldest = next(iter(self._tokens_by_hash))
            self._used -= self._tokens_by_hash.pop(oldest)

    def cached_prefix_hashes(self) -> list[int]:
        """Return the hashes of the cached prefixes, least recently used first."""
        return list(self._tokens_by_hash)

    def _touch(self, used: Sequence[int]) -> None:
        """Mark prefixes as used, the shortest last, so that a prompt's end is evicted first."""
        for mark in reversed(used):
            self._tokens_by_hash[mark] = self._tokens_by_hash.pop(mark)
