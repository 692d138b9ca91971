"""Slows those who try API keys: a token bucket for each address from which wrong keys come.

It protects one gateway, so each gateway keeps its own count, bounded in addresses and keys. Pure:
times are in seconds of any one clock.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

from api.rate_limiter import RateLimiter
from streams.errors import TooManyWrongKeys

BURST, PER_SECOND = 20, 1.0  # wrong keys of one address
MAX_ADDRESSES, MAX_ACCEPTED = 4096, 16_384
K = TypeVar("K")
V = TypeVar("V")


class WrongKeyLimiter:
    """Refuses keys of an address that has sent too many wrong ones, unless they were right there.

    So an address that clients share, as a proxy's, keeps serving those that it has served before.
    """

    def __init__(self) -> None:
        self._limiters = _Recent[str, RateLimiter](MAX_ADDRESSES)
        self._accepted = _Recent[tuple[str, str], bool](MAX_ACCEPTED)

    def check(self, address: str, key: str, now: float) -> None:
        """Raise `TooManyWrongKeys` if this key may not be tried now."""
        limiter = self._limiters.get(address)
        if limiter is None or self._accepted.get((address, key)):
            return
        if wait_seconds := limiter.reserve(now, 0):
            raise TooManyWrongKeys(wait_seconds)

    def record_wrong(self, address: str, key: str, now: float) -> None:
        """Count a key that is not known (any more)."""
        self._accepted.pop((address, key))
        limiter = self._limiters.get(address) or RateLimiter(PER_SECOND, BURST)
        limiter.reserve(now)
        self._limiters.put(address, limiter)

    def record_right(self, address: str, key: str) -> None:
        """Remember a key that was accepted from an address."""
        self._accepted.put((address, key), True)


class _Recent(Generic[K, V]):
    """A mapping that keeps the `size` entries used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries = OrderedDict[K, V]()

    def get(self, key: K) -> V | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def pop(self, key: K) -> None:
        self._entries.pop(key, None)
