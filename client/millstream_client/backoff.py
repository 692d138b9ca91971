"""Exponential backoff with full jitter, so that clients do not retry in step with others. Pure.

"Full jitter" of M. Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015).
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import random


@dataclass(frozen=True)
class Backoff:
    """Random delays: up to `initial` seconds, doubled after each failure, up to `maximum` seconds.

    `draw` returns a random number from 0 to 1.
    """

    initial: float
    maximum: float
    draw: Callable[[], float] = random

    def delay(self, failures: int) -> float:
        """Return a random number of seconds to wait after so many failures in a row; 0 for none."""
        if not failures:
            return 0.0
        return self.draw() * min(self.maximum, self.initial * 2.0 ** min(failures - 1, 32))
