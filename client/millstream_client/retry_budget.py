"""How many retries a client may send: a share of its requests, lest retries be the overload. Pure.

A tenth of the requests, as in "Handling Overload" (B. Beyer et al., Site Reliability Engineering,
2016, ch. 21), and a few per second besides for clients with few requests, as in Finagle's
`RetryBudget` (ratio, minimum per second). Both are tokens in one bucket; a retry takes one.
"""

RETRY_RATIO = 0.1
TOKENS_PER_SECOND = 10.0
MAX_TOKENS = 100.0  # what an idle client may save up: ten seconds' worth, as in Finagle


class RetryBudget:
    """Says when the next retry may be sent. `now` is in seconds of any one clock.

    It may be overdrawn: retries that find it empty stand in line, each for its own token.
    """

    def __init__(self, now: float) -> None:
        self._tokens, self._at = MAX_TOKENS, now

    def deposit(self) -> None:
        """A request was sent for the first time."""
        self._tokens = min(MAX_TOKENS, self._tokens + RETRY_RATIO)

    def delay(self, now: float) -> float:
        """Seconds until a retry that is decided on now may be sent."""
        self._tokens = min(MAX_TOKENS, self._tokens + (now - self._at) * TOKENS_PER_SECOND)
        self._at = now
        return max(0.0, 1.0 - self._tokens) / TOKENS_PER_SECOND

    def withdraw(self) -> None:
        """A retry is decided on: it will be sent after the wait."""
        self._tokens -= 1.0
