"""How long to wait before a call is made again: exponential, with full jitter. Pure.

The source is "Exponential Backoff and Jitter" (AWS Architecture Blog, 2015): of the schemes that it
compares, a delay drawn from the whole interval makes the fewest calls in the least time.
"""

from dataclasses import dataclass

_DOUBLINGS = 32  # beyond them nothing but the number grows


@dataclass(frozen=True)
class Backoff:
    """Delays that grow from `base_seconds` to `most_seconds`."""

    base_seconds: float = 0.25
    most_seconds: float = 10.0

    def delay_seconds(self, failures: int, share: float) -> float:
        """The delay after so many failures in a row (from 1); `share` is a draw from [0, 1)."""
        whole = self.base_seconds * 2.0 ** min(failures - 1, _DOUBLINGS)
        return share * min(whole, self.most_seconds)
