"""What a worker's prefix cache holds: whole blocks of a prompt, least recently used first out."""

from collections import OrderedDict
from collections.abc import Sequence

from streams import marks

BLOCK_TOKENS = 512  # as the Mooncake traces name them


class Prefixes:
    """Room for `tokens` of prompts; a block counts only behind all that come before it.

    A block's number stands for all up to its end, so it is the mark of that prefix, too; `marks`
    has those at positions that are marked, least recently used first.
    """

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.marks: OrderedDict[int, None] = OrderedDict()

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
        for mark in reversed(marks_of(blocks)):
            self.marks[mark] = None
            self.marks.move_to_end(mark)
        while len(self._blocks) > self._most:
            block, _ = self._blocks.popitem(last=False)
            self.marks.pop(block, None)


def marks_of(blocks: Sequence[int]) -> list[int]:
    """The marks of a prompt, shortest prefix first: what is marked within a block is all of it."""
    places = marks.positions(len(blocks) * BLOCK_TOKENS)
    return [blocks[-(-place // BLOCK_TOKENS) - 1] for place in places]
