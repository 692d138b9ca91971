"""Exponential backoff with full jitter, so that clients do not retry in step with others. Pure.

"Full jitter" of M. Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015).
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import random


@dataclass(frozen=True)
class Backoff:
    """Computes random pauses before retries; the caller counts the failures and does the waiting.

    The pause after the first failure is between 0 and `initial` seconds. The upper bound doubles
    with each further failure in a row, until it is `maximum` seconds. `draw` returns a random
    number from 0 to 1.
    """

    initial: float
    maximum: float
    draw: Callable[[], float] = random

    def delay(self, failures: int) -> float:
        """Return a random number of seconds to wait after `failures` failures in a row.

        Returns 0 if `failures` is 0.
        """
        if not failures:
            return 0.0
        return self.draw() * min(self.maximum, self.initial * 2.0 ** min(failures - 1, 32))
