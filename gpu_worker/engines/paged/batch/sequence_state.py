"""A sequence on its way through the engine, and the part of it that one step computes."""

from dataclasses import dataclass, field
from typing import Self

from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS
from streams.messages import pack_tokens
from streams.prefix_hashes import PrefixDigest
from streams.subjects import Priority

SlidingWindow = int | None  # tokens that a layer sees, the newest included; None: all


def first_visible_position(position: int, window: SlidingWindow) -> int:
    """The first position that the token at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


@dataclass(eq=False)
class BlockTable:
    """Blocks by position, for the layers of one window; `TRASH` up to `first`: given back."""

    blocks: list[int] = field(default_factory=list)
    first_held: int = 0

    @property
    def held_blocks(self) -> list[int]:
        return self.blocks[self.first_held :]


@dataclass(eq=False)
class SequenceState:
    """`tokens` so far; the KV of the first `done` is in the blocks of `tables`, where still seen.

    `published`: so many of its full blocks are offered to others. `restored`: so many tokens of it
    were there already when it was first admitted. `gave_way`: to others, once.
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
        """Tokens to compute before the next can be sampled: 1 while decoding."""
        return len(self.tokens) - self.computed_tokens

    def digest_block(self, block: int) -> bytes:
        """The digest of all tokens to the end of full block number `block`; computed once each."""
        while len(self.block_digests) <= block:
            start = len(self.block_digests) * BLOCK_TOKENS
            packed = pack_tokens(self.tokens[start : start + BLOCK_TOKENS])
            self.block_digests.append(self._prefix.extend(packed))
        return self.block_digests[block]


@dataclass(frozen=True)
class SequenceSlice:
    """Tokens `start` to `start + count` of a run, for one step.

    `samples`: they reach the run's last token, so the next one can be sampled.
    """

    state: SequenceState
    start: int
    count: int
    is_sampled: bool

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def tokens(self) -> list[int]:
        return self.state.tokens[self.start : self.end]

    @property
    def is_decode(self) -> bool:
        return self.count == 1 and self.is_sampled

    @classmethod
    def next_tokens(cls, run: SequenceState, count: int) -> Self:
        return cls(run, run.computed_tokens, count, count == run.pending_tokens)
