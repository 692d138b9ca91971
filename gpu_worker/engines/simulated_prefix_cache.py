"""Which prompts an engine with so much KV would find in its prefix cache. Pure."""

from collections.abc import Sequence
from itertools import islice, pairwise, takewhile

from streams import prefix_hashes


class SimulatedPrefixCache:
    """Room for `tokens` of prompts by their marks, the least recently used going first."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._used = tokens, 0
        self._tokens_by_hash: dict[int, int] = {}  # by mark: its tokens behind the mark before it

    def match_prefix(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt with these marks that are there; they are used by that."""
        there = list(takewhile(self._tokens_by_hash.__contains__, prompt))
        self._touch(there)
        return sum(self._tokens_by_hash[mark] for mark in there)

    def insert(self, prompt: Sequence[int]) -> None:
        """A prompt was computed."""
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
        """Least recently used first."""
        return list(self._tokens_by_hash)

    def _touch(self, used: Sequence[int]) -> None:
        """The end of a prompt goes before its start."""
        for mark in reversed(used):
            self._tokens_by_hash[mark] = self._tokens_by_hash.pop(mark)
