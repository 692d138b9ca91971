"""A sequence on its way through the engine, and the part of it that one step computes."""

from dataclasses import dataclass, field
from typing import Self

from gpu_worker.engines.paged.blocks import BLOCK_TOKENS
from streams.marks import PrefixDigest
from streams.messages import pack_tokens
from streams.subjects import Priority

Window = int | None  # tokens that a layer sees, the newest included; None: all


def first_seen(position: int, window: Window) -> int:
    """The first position that the token at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


@dataclass(eq=False)
class Table:
    """Blocks by position, for the layers of one window; `TRASH` up to `first`: given back."""

    blocks: list[int] = field(default_factory=list)
    first: int = 0

    @property
    def held(self) -> list[int]:
        return self.blocks[self.first :]


@dataclass(eq=False)
class Run:
    """`tokens` so far; the KV of the first `done` is in the blocks of `tables`, where still seen.

    `published`: so many of its full blocks are offered to others. `restored`: so many tokens of it
    were there already when it was first admitted. `gave_way`: to others, once.
    """

    request_id: str
    tokens: list[int]
    salt: bytes = b""
    priority: Priority = Priority.STANDARD
    done: int = 0
    tables: dict[Window, Table] = field(default_factory=dict)
    published: int = 0
    restored: int = 0
    digests: list[bytes] = field(default_factory=list)
    gave_way: bool = False

    def __post_init__(self) -> None:
        self._prefix = PrefixDigest(self.salt)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next can be sampled: 1 while decoding."""
        return len(self.tokens) - self.done

    def digest(self, block: int) -> bytes:
        """The digest of all tokens to the end of full block number `block`; computed once each."""
        while len(self.digests) <= block:
            start = len(self.digests) * BLOCK_TOKENS
            packed = pack_tokens(self.tokens[start : start + BLOCK_TOKENS])
            self.digests.append(self._prefix.extend(packed))
        return self.digests[block]


@dataclass(frozen=True)
class Slice:
    """Tokens `start` to `start + count` of a run, for one step.

    `samples`: they reach the run's last token, so the next one can be sampled.
    """

    run: Run
    start: int
    count: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def tokens(self) -> list[int]:
        return self.run.tokens[self.start : self.end]

    @property
    def is_decode(self) -> bool:
        return self.count == 1 and self.samples

    @classmethod
    def of(cls, run: Run, count: int) -> Self:
        return cls(run, run.done, count, count == run.pending)
