"""How long to wait before the next try: longer each time, and never in step with others. Pure.

"Full jitter" of M. Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015).
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import random


@dataclass(frozen=True)
class Backoff:
    """Waits of up to `first`, then twice that, and so on, but never over `most` (seconds)."""

    initial: float
    maximum: float
    draw: Callable[[], float] = random

    def delay(self, failures: int) -> float:
        """The wait after so many failures in a row; none after none."""
        if not failures:
            return 0.0
        return self.draw() * min(self.maximum, self.initial * 2.0 ** min(failures - 1, 32))
