"""Model of a worker's prefix cache: whole blocks of prompts, evicted least recently used first."""

from collections import OrderedDict
from collections.abc import Sequence

from streams import prefix_hashes

BLOCK_TOKENS = 512  # the block size of the Mooncake traces


class PrefixCacheModel:
    """Model of a worker's prefix cache with space for `tokens` prompt tokens, in blocks of 512.

    A prompt is given as the numbers of its blocks. A block's number stands for the whole prompt up
    to its end, so it serves as the hash of that prefix. A cached block is usable only if all blocks
    before it in the prompt are cached, too. `hashes` has the prefix hashes of what is cached, least
    recently used first.
    """

    def __init__(self, tokens: int) -> None:
        self._max_blocks = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.hashes: OrderedDict[int, None] = OrderedDict()

    def match_tokens(self, blocks: Sequence[int]) -> int:
        """Return how many tokens of a prompt's start are cached, a multiple of 512; 0 if none.

        The matched blocks become the most recently used ones.
        """
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        for block in reversed(blocks[:count]):  # so that a prompt's end is evicted before its start
            self._blocks.move_to_end(block)
        return count * BLOCK_TOKENS

    def insert(self, blocks: Sequence[int]) -> None:
        """Cache all blocks of a computed prompt; if full, evict the least recently used."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        for prefix_hash in reversed(hash_prefixes(blocks)):
            self.hashes[prefix_hash] = None
            self.hashes.move_to_end(prefix_hash)
        while len(self._blocks) > self._max_blocks:
            block, _ = self._blocks.popitem(last=False)
            self.hashes.pop(block, None)


def hash_prefixes(blocks: Sequence[int]) -> list[int]:
    """Return the prefix hashes of a prompt that is given by its blocks, shortest prefix first.

    A hash position within a block gets the hash of the whole block.
    """
    positions = prefix_hashes.hash_positions(len(blocks) * BLOCK_TOKENS)
    return [blocks[-(-position // BLOCK_TOKENS) - 1] for position in positions]
