"""A pool of KV blocks with reference counts and a prefix cache.

A full block is cached under the digest of all tokens from the sequence's start to the block's end.

Pure.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from streams.prefix_hashes import truncate_digest

BLOCK_TOKENS = 16
NULL_BLOCK = 0  # never handed out: padding reads and writes here


def blocks_for(tokens: int) -> int:
    """Return the number of KV blocks of 16 tokens that `tokens` tokens need, rounded up."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """Allocates `count` KV blocks, numbered from 1, and keeps published ones in a prefix cache.

    A published block is full, and can be shared by sequences that begin with the same tokens. When
    no sequence references it any more it stays cached: `share` can take it up again, and it is
    evicted, least recently used first, when no block is free. `prefix_hashes` are the hashes of
    advertised prefixes, those that workers report to the dispatcher, least recently used first.
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
        """The number of blocks that `allocate` can hand out now: free ones and cached ones."""
        return len(self._free) + len(self._evictable)

    @property
    def cached(self) -> int:
        """The number of published blocks that no sequence references; they can be evicted."""
        return len(self._evictable)

    def count_freed_by(self, block_lists: Iterable[Sequence[int]]) -> int:
        """Return by how many blocks `available` would rise if all these lists were released.

        Each list holds the blocks of one sequence. A block that yet another sequence references
        does not count. Nothing is released.
        """
        held = Counter(block for blocks in block_lists for block in blocks)
        return sum(self._references[block] == count for block, count in held.items())

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each, evicting cached ones if needed.

        Their content is undefined. The caller must have checked `available`; a `KeyError` means
        that there were too few.
        """
        return [self._allocate_one() for _ in range(count)]

    def is_published(self, digest: bytes) -> bool:
        """Return whether a block is published under `digest`, so that `share` can be called."""
        return digest in self._published

    def share(self, digest: bytes) -> int:
        """Add a reference to the block published under `digest`, and return the block's number.

        The caller must have checked `is_published`; an unknown digest raises `KeyError`.
        """
        block = self._published[digest]
        self._evictable.pop(block, None)
        self._references[block] += 1
        if (prefix_hash := truncate_digest(digest)) in self.prefix_hashes:
            del self.prefix_hashes[prefix_hash]
            self.prefix_hashes[prefix_hash] = None
        return block

    def publish(self, block: int, digest: bytes, *, advertise: bool = False) -> None:
        """Publish a full block under `digest`, so that `share` finds it for other sequences.

        Does nothing if the block is published already, or if another block is published under the
        digest. With `advertise` the hash of the prefix that ends with the block is added to
        `prefix_hashes`.
        """
        if block not in self._digests and digest not in self._published:
            self._digests[block] = digest
            self._published[digest] = block
            if advertise:
                self.prefix_hashes[truncate_digest(digest)] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of one sequence's blocks, which come in order of position.

        Blocks that nobody references any more become free or, if published, evictable; those of the
        sequence's end are evicted before those of its start. A block without a reference fails an
        assertion.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released twice"
            if self._references[block] == 0:
                self._retire(block)

    def discard(self, blocks: Sequence[int]) -> list[int]:
        """Release blocks whose content is bad, and unpublish them, so that they are not shared.

        Returns those of them that no sequence references any more.
        """
        for block in blocks:
            self._unpublish(block)
        self.release(blocks)
        return [block for block in blocks if self._references[block] == 0]

    def reset_prefix_cache(self) -> None:
        """Evict every cached block. Blocks that a sequence references stay published."""
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
