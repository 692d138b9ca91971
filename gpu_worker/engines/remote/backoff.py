"""Retry delays: exponential backoff with full jitter. Pure.

The source is "Exponential Backoff and Jitter" (AWS Architecture Blog, 2015): of the schemes that it
compares, a delay drawn from the whole interval makes the fewest calls in the least time.
"""

from dataclasses import dataclass

_DOUBLINGS = 32  # at most: the delay has long reached its maximum, and the power would overflow


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff with full jitter: random delays before the retries of a failed call.

    The longest possible delay begins at `base_seconds` and doubles up to `max_seconds`.
    """

    base_seconds: float = 0.25
    max_seconds: float = 10.0

    def delay_seconds(self, failures: int, share: float) -> float:
        """Return the seconds to wait after `failures` failures in a row (1 or more).

        `share` is a uniform draw from [0, 1). The delay is that share of the longest possible one.
        """
        longest = self.base_seconds * 2.0 ** min(failures - 1, _DOUBLINGS)
        return share * min(longest, self.max_seconds)
