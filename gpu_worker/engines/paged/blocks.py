"""KV blocks: reference counts, and full blocks cached by the digest of all tokens to their end."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from streams.marks import mark

BLOCK_TOKENS = 16
TRASH = 0  # never handed out: padding reads and writes here


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class Blocks:
    """`count` blocks to hand out, numbered from 1.

    A published block that nobody references any more stays cached: it serves a later `hit`, and is
    evicted, least recently used first, when no block is free. `marks` are those of the prefixes
    that end with a published block and are to be told, least recently used first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(1, count + 1))
        self._references = [0] * (count + 1)
        self._digests: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.marks: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out now, evicting if need be."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def freed_by(self, holders: Iterable[Sequence[int]]) -> int:
        """How many more blocks would be available if all these holders released theirs."""
        held = Counter(block for blocks in holders for block in blocks)
        return sum(self._references[block] == count for block, count in held.items())

    def take(self, count: int) -> list[int]:
        """Hand out blocks whose content is undefined. The caller has checked `available`."""
        return [self._take() for _ in range(count)]

    def has(self, digest: bytes) -> bool:
        """Whether a block is published under `digest`."""
        return digest in self._published

    def hit(self, digest: bytes) -> int:
        """Share the block published under `digest`. The caller has checked `has`."""
        block = self._published[digest]
        self._cached.pop(block, None)
        self._references[block] += 1
        if (used := mark(digest)) in self.marks:
            del self.marks[used]
            self.marks[used] = None
        return block

    def publish(self, block: int, digest: bytes, *, marked: bool = False) -> None:
        """Offer a full block to others. The first block of a digest stays the published one."""
        if block not in self._digests and digest not in self._published:
            self._digests[block] = digest
            self._published[digest] = block
            if marked:
                self.marks[mark(digest)] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each; the end of a sequence is evicted before its start."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released twice"
            if self._references[block] == 0:
                self._retire(block)

    def discard(self, blocks: Sequence[int]) -> list[int]:
        """Give back blocks of bad content: none will be hit. Returns those that nobody uses now."""
        for block in blocks:
            self._unpublish(block)
        self.release(blocks)
        return [block for block in blocks if self._references[block] == 0]

    def forget(self) -> None:
        """Empty the cache."""
        while self._cached:
            self._free.append(self._evict())

    def _take(self) -> int:
        block = self._free.popleft() if self._free else self._evict()
        self._references[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._unpublish(block)
        return block

    def _retire(self, block: int) -> None:
        if block in self._digests:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _unpublish(self, block: int) -> None:
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._published[digest]
            self.marks.pop(mark(digest), None)
