"""What a worker's prefix cache holds: whole blocks of a prompt, least recently used first out."""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 512  # as the Mooncake traces name them


class Prefixes:
    """Room for `tokens` of prompts; a block counts only behind all that come before it."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, blocks: Sequence[int]) -> int:
        """Tokens of a prompt that are here."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        for block in reversed(blocks[:count]):  # so that its end goes before its start
            self._blocks.move_to_end(block)
        return count * BLOCK_TOKENS

    def keep(self, blocks: Sequence[int]) -> None:
        """A prompt was computed: its blocks are here, as far as there is room."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
