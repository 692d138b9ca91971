"""KV blocks: reference counts, and full blocks cached by the digest of all tokens to their end.

Pure.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from streams.prefix_hashes import truncate_digest

BLOCK_TOKENS = 16
NULL_BLOCK = 0  # never handed out: padding reads and writes here


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
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
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.prefix_hashes: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out now, evicting if need be."""
        return len(self._free) + len(self._evictable)

    @property
    def cached(self) -> int:
        return len(self._evictable)

    def count_freed_by(self, holders: Iterable[Sequence[int]]) -> int:
        """How many more blocks would be available if all these holders released theirs."""
        held = Counter(block for blocks in holders for block in blocks)
        return sum(self._references[block] == count for block, count in held.items())

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks whose content is undefined. The caller has checked `available`."""
        return [self._allocate_one() for _ in range(count)]

    def is_published(self, digest: bytes) -> bool:
        """Whether a block is published under `digest`."""
        return digest in self._published

    def share(self, digest: bytes) -> int:
        """Share the block published under `digest`. The caller has checked `has`."""
        block = self._published[digest]
        self._evictable.pop(block, None)
        self._references[block] += 1
        if (used := truncate_digest(digest)) in self.prefix_hashes:
            del self.prefix_hashes[used]
            self.prefix_hashes[used] = None
        return block

    def publish(self, block: int, digest: bytes, *, marked: bool = False) -> None:
        """Offer a full block to others. The first block of a digest stays the published one."""
        if block not in self._digests and digest not in self._published:
            self._digests[block] = digest
            self._published[digest] = block
            if marked:
                self.prefix_hashes[truncate_digest(digest)] = None

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

    def reset_prefix_cache(self) -> None:
        """Empty the cache."""
        while self._evictable:
            self._free.append(self._evict())

    def _allocate_one(self) -> int:
        block = self._free.popleft() if self._free else self._evict()
        self._references[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._unpublish(block)
        return block

    def _retire(self, block: int) -> None:
        if block in self._digests:
            self._evictable[block] = None
        else:
            self._free.append(block)

    def _unpublish(self, block: int) -> None:
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._published[digest]
            self.prefix_hashes.pop(truncate_digest(digest), None)
