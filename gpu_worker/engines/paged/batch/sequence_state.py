"""A sequence as the scheduler sees it, its block tables, and the slice that one step computes."""

from dataclasses import dataclass, field
from typing import Self

from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS
from streams.messages import pack_tokens
from streams.prefix_hashes import PrefixDigest
from streams.subjects import Priority

SlidingWindow = int | None  # tokens that a layer attends to, the newest included; None: all


def first_visible_position(position: int, window: SlidingWindow) -> int:
    """Return the first position that the token at `position` attends to; 0 without a window."""
    return 0 if window is None else max(0, position + 1 - window)


@dataclass(eq=False)
class BlockTable:
    """The numbers of a sequence's KV blocks in order of position, for the layers of one window.

    Blocks before index `first_held` have moved out of the window and were released; in their places
    stands the null block.
    """

    blocks: list[int] = field(default_factory=list)
    first_held: int = 0

    @property
    def held_blocks(self) -> list[int]:
        """The blocks that the sequence still references."""
        return self.blocks[self.first_held :]


@dataclass(eq=False)
class SequenceState:
    """A sequence as the scheduler sees it: its tokens so far, and where their KV lies.

    `tokens` are prompt and output. The KV of the first `computed_tokens` of them is computed and
    lies in the blocks of `block_tables`, by window, as far as the window still covers it. The first
    `published_blocks` full blocks can be shared by other sequences. `hit_tokens` were found in the
    prefix cache when the sequence was first admitted. `salt` keeps apart sequences that must not
    share KV. `was_preempted` is True once it was preempted at least once.
    """

    request_id: str
    tokens: list[int]
    salt: bytes = b""
    priority: Priority = Priority.STANDARD
    computed_tokens: int = 0
    block_tables: dict[SlidingWindow, BlockTable] = field(default_factory=dict)
    published_blocks: int = 0
    hit_tokens: int = 0
    block_digests: list[bytes] = field(default_factory=list)
    was_preempted: bool = False

    def __post_init__(self) -> None:
        self._prefix = PrefixDigest(self.salt)

    @property
    def pending_tokens(self) -> int:
        """The number of tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.computed_tokens

    def digest_block(self, block: int) -> bytes:
        """Return the digest of the sequence's cache salt and all tokens up to the end of a block.

        `block` counts from 0 in the sequence; the block must be full, else the digest is wrong.
        Digests are kept once computed.
        """
        while len(self.block_digests) <= block:
            start = len(self.block_digests) * BLOCK_TOKENS
            packed = pack_tokens(self.tokens[start : start + BLOCK_TOKENS])
            self.block_digests.append(self._prefix.extend(packed))
        return self.block_digests[block]


@dataclass(frozen=True)
class SequenceSlice:
    """The tokens of one sequence that one step computes: `count` tokens from position `start` on.

    `is_sampled` is True if the slice reaches the sequence's last token, so that the step samples
    the next one.
    """

    state: SequenceState
    start: int
    count: int
    is_sampled: bool

    @property
    def end(self) -> int:
        """The position after the slice's last token."""
        return self.start + self.count

    @property
    def tokens(self) -> list[int]:
        """The slice's token ids."""
        return self.state.tokens[self.start : self.end]

    @property
    def is_decode(self) -> bool:
        """True when the slice is one token, the sequence's last, as in decoding."""
        return self.count == 1 and self.is_sampled

    @classmethod
    def next_tokens(cls, state: SequenceState, count: int) -> Self:
        """Return the slice of the next `count` tokens of a sequence that are not computed yet."""
        return cls(state, state.computed_tokens, count, count == state.pending_tokens)
