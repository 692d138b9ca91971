"""Derives the sampling seed of requests that set none. Pure."""

from hashlib import blake2b


def derive_seed(request_id: str) -> int:
    """Return a seed that is the same for every attempt at a request."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=7).digest(), "little")
