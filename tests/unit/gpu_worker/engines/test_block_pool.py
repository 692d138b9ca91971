"""Blocks are counted right, and cached blocks serve whoever has the same tokens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_worker.engines.paged.batch.block_pool import BlockPool, blocks_for
from streams.prefix_hashes import truncate_digest

COUNT = 6


class BlocksMachine(RuleBasedStateMachine):
    """Owners take, publish, share and give back blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockPool(COUNT)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(1, COUNT))
    def take(self, count: int) -> None:
        if count <= self.blocks.available:
            taken = self.blocks.allocate(count)
            held = {block for owner in self.owners for block in owner}
            assert len(set(taken)) == count
            assert not held & set(taken)
            self.owners.append(taken)

    @rule(digest=st.sampled_from([b"a", b"b", b"c"]))
    def hit(self, digest: bytes) -> None:
        if self.blocks.is_published(digest):
            self.owners.append([self.blocks.share(digest)])

    @precondition(lambda self: self.owners)
    @rule(digest=st.sampled_from([b"a", b"b", b"c"]), data=st.data())
    def publish(self, digest: bytes, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.blocks.publish(owner[0], digest)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), bad=st.booleans())
    def give_back(self, data: st.DataObject, bad: bool) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        if bad:
            held = {block for other in self.owners for block in other}
            assert set(self.blocks.discard(owner)) == set(owner) - held
        else:
            self.blocks.release(owner)

    @rule()
    def forget(self) -> None:
        self.blocks.reset_prefix_cache()
        assert self.blocks.cached == 0

    @invariant()
    def every_block_is_held_or_available(self) -> None:
        held = {block for owner in self.owners for block in owner}
        assert self.blocks.available == COUNT - len(held)
        assert held <= set(range(1, COUNT + 1))


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=30)


def test_a_published_block_is_shared_and_outlives_its_owner() -> None:
    """A conversation's next turn finds the blocks of the one before."""
    blocks = BlockPool(2)
    (block,) = blocks.allocate(1)
    blocks.publish(block, b"a")
    assert blocks.share(b"a") == block
    blocks.release([block])
    blocks.release([block])
    assert blocks.share(b"a") == block


def test_the_least_recently_used_end_is_evicted_first() -> None:
    """Starts are shared more often than ends."""
    blocks = BlockPool(3)
    taken = blocks.allocate(3)
    for block, digest in zip(taken, (b"1", b"2", b"3"), strict=True):
        blocks.publish(block, digest)
    blocks.release(taken)
    blocks.allocate(1)
    assert not blocks.is_published(b"3")
    assert blocks.share(b"1") == taken[0]


def test_a_discarded_block_is_hit_no_more() -> None:
    """Its content is bad."""
    blocks = BlockPool(2)
    taken = blocks.allocate(1)
    blocks.publish(taken[0], b"a")
    assert blocks.discard(taken) == taken
    assert not blocks.is_published(b"a")


def test_a_block_cannot_be_released_twice() -> None:
    """Two owners of one block would write over each other."""
    blocks = BlockPool(2)
    taken = blocks.allocate(1)
    blocks.release(taken)
    with pytest.raises(AssertionError, match="twice"):
        blocks.release(taken)


def test_the_marks_told_are_those_of_published_blocks() -> None:
    """A dispatcher that believes in what was evicted sends work on a detour for nothing."""
    blocks = BlockPool(2)
    old, new = blocks.allocate(2)
    blocks.publish(old, b"old-----", advertise=True)
    blocks.publish(new, b"new-----", advertise=True)
    blocks.release([old])
    blocks.release([new])
    blocks.release([blocks.share(b"old-----")])
    assert list(blocks.prefix_hashes) == [
        truncate_digest(b"new-----"),
        truncate_digest(b"old-----"),
    ]
    blocks.allocate(1)
    assert list(blocks.prefix_hashes) == [truncate_digest(b"old-----")]


def test_blocks_for_rounds_up() -> None:
    """A token more than a block needs another block."""
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
