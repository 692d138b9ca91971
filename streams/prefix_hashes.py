"""Marks: short names of what a request could reuse on a worker, of its prompt or its adapter.

A prompt is marked at 64, 96, 128, 192, 256, 384, … tokens, so that a few marks find at least two
thirds of any longer prefix that it shares with another. A mark is the beginning of the digest of
all tokens up to there, behind a salt of tenant and adapter: prompts of two tenants share nothing.
Gateways mark prompts, engines what they hold; both by `PrefixDigest`.
"""

import base64
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

MIN_PREFIX_TOKENS = 64  # less is not worth a detour
HASH_BYTES = 8
_TOKEN_BYTES = 4


def make_salt(tenant: str, adapter_digest: str = "") -> bytes:
    """What keeps apart prompts that may share nothing, or whose KV differs."""
    return blake2b(f"{tenant}\n{adapter_digest}".encode(), digest_size=16).digest()


class PrefixDigest:
    """The digest of a growing start of one prompt."""

    def __init__(self, salt: bytes) -> None:
        self._hash = blake2b(salt, digest_size=16)

    def extend(self, packed: bytes) -> bytes:
        """The digest with these tokens (`messages.pack_tokens`) behind all before them."""
        self._hash.update(packed)
        return self._hash.digest()


def hash_positions(tokens: int) -> Iterator[int]:
    """Where a prompt of so many tokens is marked, shortest first."""
    position = MIN_PREFIX_TOKENS
    while position <= tokens:
        yield position
        power = position & (position - 1) == 0
        position = position * 3 // 2 if power else position * 4 // 3


def is_hash_position(tokens: int) -> bool:
    """Whether a longer prompt is marked at so many tokens."""
    odd = tokens // (tokens & -tokens)
    return tokens >= MIN_PREFIX_TOKENS and odd in (1, 3)


def truncate_digest(digest: bytes) -> int:
    """The mark of a digest."""
    return int.from_bytes(digest[:HASH_BYTES], "little")


def hash_prompt(packed: bytes, salt: bytes) -> list[int]:
    """The marks of a prompt (`messages.pack_tokens`), shortest prefix first."""
    digest, done, found = PrefixDigest(salt), 0, list[int]()
    for position in hash_positions(len(packed) // _TOKEN_BYTES):
        found.append(
            truncate_digest(digest.extend(packed[_TOKEN_BYTES * done : _TOKEN_BYTES * position]))
        )
        done = position
    return found


@lru_cache(maxsize=1024)
def hash_adapter(name: str) -> int:
    """The mark of one of a model's adapters."""
    return truncate_digest(blake2b(name.encode(), digest_size=HASH_BYTES).digest())


def pack(marks: Iterable[int]) -> bytes:
    found = list(marks)
    return struct.pack(f"<{len(found)}Q", *found)


def unpack(data: bytes) -> Sequence[int]:
    return struct.unpack(f"<{len(data) // HASH_BYTES}Q", data)


def to_header(marks: Iterable[int]) -> str:
    return base64.b64encode(pack(marks)).decode()


def from_header(value: str) -> Sequence[int]:
    """Raises ValueError for what `to_header` did not write."""
    data = base64.b64decode(value, validate=True)
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are no marks of {HASH_BYTES}")
    return unpack(data)
