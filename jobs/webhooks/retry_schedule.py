"""Schedule of attempts at a webhook: ten over three days, with jitter. Pure."""

from collections.abc import Sequence

# Seconds from one failed attempt to the next, as the Standard Webhooks specification has them
RETRY_SECONDS = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
MAX_RETRY_AFTER_SECONDS = 86_400.0
JITTER = 0.1  # of a delay, so that what failed together does not come together again


def next_delay(
    tries: int,
    retry_after: float | None,
    random: float,
    delays: Sequence[float] = RETRY_SECONDS,
) -> float | None:
    """Return the seconds until the attempt after the first `tries`; None if there is none.

    `retry_after` is what the endpoint has asked for, in seconds: no attempt comes before, but for
    more than a day. `random` is from 0 to 1; the delay is up to a tenth longer by it.
    """
    if not 1 <= tries <= len(delays):
        return None
    asked = min(retry_after or 0.0, MAX_RETRY_AFTER_SECONDS)
    return max(asked, delays[tries - 1]) * (1 + JITTER * random)
