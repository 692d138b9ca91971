"""A budget of retries, as a share of a client's requests, so that retries cannot overload. Pure.

A tenth of the requests, as in "Handling Overload" (B. Beyer et al., Site Reliability Engineering,
2016, ch. 21), and a few per second besides for clients with few requests, as in Finagle's
`RetryBudget` (ratio, minimum per second). Both are tokens in one bucket; a retry takes one.
"""

RETRY_RATIO = 0.1
TOKENS_PER_SECOND = 10.0
MAX_TOKENS = 100.0  # an idle client saves ten seconds' worth at most, as in Finagle


class RetryBudget:
    """A token bucket that says when the next retry may be sent.

    It gains a tenth of a token with each new request, and ten tokens a second; a retry takes one.
    The bucket may be overdrawn: retries that find it empty queue, each for a token of its own.
    `now` is in seconds of one monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._tokens, self._at = MAX_TOKENS, now

    def deposit(self) -> None:
        """Add a tenth of a token, since a request was sent for the first time."""
        self._tokens = min(MAX_TOKENS, self._tokens + RETRY_RATIO)

    def delay(self, now: float) -> float:
        """Return after how many seconds a retry that is decided on now may be sent; 0: at once."""
        self._tokens = min(MAX_TOKENS, self._tokens + (now - self._at) * TOKENS_PER_SECOND)
        self._at = now
        return max(0.0, 1.0 - self._tokens) / TOKENS_PER_SECOND

    def withdraw(self) -> None:
        """Take the token of a retry that will be sent after its `delay`."""
        self._tokens -= 1.0
