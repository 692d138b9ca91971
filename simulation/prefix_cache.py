"""What a worker's prefix cache holds: whole blocks of a prompt, least recently used first out."""

from collections import OrderedDict
from collections.abc import Sequence

from streams import prefix_hashes

BLOCK_TOKENS = 512  # as the Mooncake traces name them


class PrefixCacheModel:
    """Room for `tokens` of prompts; a block counts only behind all that come before it.

    A block's number stands for all up to its end, so it is the mark of that prefix, too; `marks`
    has those at positions that are marked, least recently used first.
    """

    def __init__(self, tokens: int) -> None:
        self._max_blocks = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.hashes: OrderedDict[int, None] = OrderedDict()

    def match_tokens(self, blocks: Sequence[int]) -> int:
        """Tokens of a prompt that are here."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        for block in reversed(blocks[:count]):  # so that its end goes before its start
            self._blocks.move_to_end(block)
        return count * BLOCK_TOKENS

    def insert(self, blocks: Sequence[int]) -> None:
        """A prompt was computed: its blocks are here, as far as there is room."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        for mark in reversed(hash_prefixes(blocks)):
            self.hashes[mark] = None
            self.hashes.move_to_end(mark)
        while len(self._blocks) > self._max_blocks:
            block, _ = self._blocks.popitem(last=False)
            self.hashes.pop(block, None)


def hash_prefixes(blocks: Sequence[int]) -> list[int]:
    """The marks of a prompt, shortest prefix first: what is marked within a block is all of it."""
    places = prefix_hashes.hash_positions(len(blocks) * BLOCK_TOKENS)
    return [blocks[-(-place // BLOCK_TOKENS) - 1] for place in places]
