"""Prefix hashes: 64-bit hashes by which a worker that has a prompt's start or an adapter is found.

A prompt is hashed at 64, 96, 128, 192, 256, 384, … tokens, so that a few hashes find at least two
thirds of any longer prefix that it shares with another prompt. A prefix hash is the beginning of
the digest of a salt and all tokens up to there. The salt is made of tenant and adapter: prompts of
two tenants share nothing. Gateways hash prompts, engines hash what they have cached; both use
`PrefixDigest`.
"""

import base64
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

MIN_PREFIX_TOKENS = 64  # a shorter prefix is not worth choosing the worker by it
HASH_BYTES = 8
_TOKEN_BYTES = 4


def make_salt(tenant: str, adapter_digest: str = "") -> bytes:
    """Return the 16 bytes with which the hashes of a tenant's prompts begin.

    Different salts keep apart prompts of different tenants, and prompts whose KV differs because of
    the adapter.
    """
    return blake2b(f"{tenant}\n{adapter_digest}".encode(), digest_size=16).digest()


class PrefixDigest:
    """Running digest of the start of one prompt, which grows as tokens are appended.

    `salt` is from `make_salt`.
    """

    def __init__(self, salt: bytes) -> None:
        self._hash = blake2b(salt, digest_size=16)

    def extend(self, packed: bytes) -> bytes:
        """Append tokens, packed by `messages.pack_tokens`; return the digest of all tokens so far.

        The digest has 16 bytes.
        """
        self._hash.update(packed)
        return self._hash.digest()


def hash_positions(tokens: int) -> Iterator[int]:
    """Yield the prefix lengths at which a prompt of `tokens` tokens is hashed, shortest first.

    They are 64, 96, 128, 192, 256, … up to `tokens`; none for a prompt of fewer than 64 tokens.
    """
    position = MIN_PREFIX_TOKENS
    while position <= tokens:
        yield position
        is_power_of_two = position & (position - 1) == 0
        position = position * 3 // 2 if is_power_of_two else position * 4 // 3


def is_hash_position(tokens: int) -> bool:
    """Return whether prompts that are long enough are hashed at a prefix of this many tokens.

    `tokens` must be positive.
    """
    odd_part = tokens // (tokens & -tokens)
    return tokens >= MIN_PREFIX_TOKENS and odd_part in (1, 3)


def truncate_digest(digest: bytes) -> int:
    """Return the prefix hash of a digest: its first 8 bytes as a little-endian integer."""
    return int.from_bytes(digest[:HASH_BYTES], "little")


def hash_prompt(packed: bytes, salt: bytes) -> list[int]:
    """Return the prefix hashes of a prompt, shortest prefix first; none below 64 tokens.

    `packed` is from `messages.pack_tokens`, `salt` from `make_salt`.
    """
    digest, done, found = PrefixDigest(salt), 0, list[int]()
    for position in hash_positions(len(packed) // _TOKEN_BYTES):
        found.append(
            truncate_digest(digest.extend(packed[_TOKEN_BYTES * done : _TOKEN_BYTES * position]))
        )
        done = position
    return found


@lru_cache(maxsize=1024)
def hash_adapter(name: str) -> int:
    """Return the hash of an adapter's name, by which workers that have it loaded are found.

    The hash shares the 64-bit space of the prefix hashes.
    """
    return truncate_digest(blake2b(name.encode(), digest_size=HASH_BYTES).digest())


def pack(hashes: Iterable[int]) -> bytes:
    """Return prefix hashes encoded as little-endian uint64, 8 bytes each."""
    values = list(hashes)
    return struct.pack(f"<{len(values)}Q", *values)


def unpack(data: bytes) -> Sequence[int]:
    """Return the prefix hashes that `pack` encoded.

    Raises `struct.error` if the length is not a multiple of 8 bytes.
    """
    return struct.unpack(f"<{len(data) // HASH_BYTES}Q", data)


def to_header(hashes: Iterable[int]) -> str:
    """Return prefix hashes encoded as base64, the value of the header `Marks`."""
    return base64.b64encode(pack(hashes)).decode()


def from_header(value: str) -> Sequence[int]:
    """Return the prefix hashes that `to_header` encoded; raises ValueError for other text."""
    data = base64.b64decode(value, validate=True)
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not a multiple of {HASH_BYTES}")
    return unpack(data)
