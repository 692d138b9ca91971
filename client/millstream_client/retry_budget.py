"""A budget of retries, as a share of a client's requests, so that retries cannot overload. Pure.

A tenth of the requests, as in "Handling Overload" (B. Beyer et al., Site Reliability Engineering,
2016, ch. 21), and a few per second besides for clients with few requests, as in Finagle's
`RetryBudget` (ratio, minimum per second). Both are tokens in one bucket; a retry takes one.
"""

RETRY_RATIO = 0.1
TOKENS_PER_SECOND = 10.0
MAX_TOKENS = 100.0  # an idle client saves ten seconds' worth at most, as in Finagle


class RetryBudget:
    """A token bucket that limits a client's retries; it says when the next retry may be sent.

    The bucket gains ten tokens a second and a tenth of a token with each new request, up to 100
    tokens, with which it starts. A retry takes one token. Retries that find the bucket empty are
    given later and later times, since the count may go below zero. `now` is always in seconds of
    the same monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._tokens, self._at = MAX_TOKENS, now

    def deposit(self) -> None:
        """Add a tenth of a token; to be called once for each new request, not for retries."""
        self._tokens = min(MAX_TOKENS, self._tokens + RETRY_RATIO)

    def delay(self, now: float) -> float:
        """Return how many seconds a retry must wait, from `now` on; 0 if it may be sent at once.

        No token is taken; a caller that will send the retry then calls `withdraw`.
        """
        self._tokens = min(MAX_TOKENS, self._tokens + (now - self._at) * TOKENS_PER_SECOND)
        self._at = now
        return max(0.0, 1.0 - self._tokens) / TOKENS_PER_SECOND

    def withdraw(self) -> None:
        """Take one token, for a retry that the caller will send after the `delay` it was given."""
        self._tokens -= 1.0
