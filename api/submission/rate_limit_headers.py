"""`x-ratelimit-*` headers, which tell OpenAI clients of their quotas per minute. Pure."""

from collections.abc import Iterable

from api.submission.quota_checks import PerMinuteCheck, QuotaScope, Totals
from streams.quota_windows import QuotaWindow
from streams.usage_accounts import Meter

_EMPTY_WINDOW = QuotaWindow(0, 0, 0.0)


class RateLimitHeaders:
    """Builds `x-ratelimit-*` headers from the use of each quota per minute that was recorded last.

    One instance serves a whole gateway, and does not know of requests at other gateways since then.
    A quota that was never recorded counts as unused.
    """

    def __init__(self) -> None:
        self._windows: dict[tuple[QuotaScope, Meter], QuotaWindow] = {}

    def record(self, check: PerMinuteCheck, totals: Totals, now: float, *, refused: bool) -> None:
        """Remember the use of a quota that `totals`, read after a request was added, show at `now`.

        If the request was `refused`, its own amount is subtracted first. `now` is in epoch seconds.
        """
        window = check.read_window(totals, now)
        self._windows[check.scope, check.meter] = (
            window.without(check.amount) if refused else window
        )

    def build(self, scopes: Iterable[QuotaScope], now: float) -> list[tuple[bytes, bytes]]:
        """Return the headers as pairs of name and value: limit, remaining and reset.

        There are three for requests and three for tokens, each set from the scope (tenant or key)
        that has the least left. A quantity that no scope limits has no headers. `now` is in epoch
        seconds.
        """
        limits = {Meter.REQUESTS: "requests_per_minute", Meter.TOKENS: "tokens_per_minute"}
        headers: list[tuple[bytes, bytes]] = []
        for meter, quota in limits.items():
            bounded = [(getattr(s.limits, quota), self._last_window(s, meter)) for s in scopes]
            bounded = [(limit, window) for limit, window in bounded if limit is not None]
            if bounded:
                tightest = min(bounded, key=lambda each: each[1].remaining(each[0], now))
                headers += _header_lines(meter, *tightest, now)
        return headers

    def _last_window(self, scope: QuotaScope, meter: Meter) -> QuotaWindow:
        return self._windows.get((scope, meter), _EMPTY_WINDOW)


def _header_lines(
    meter: Meter, limit: int, window: QuotaWindow, now: float
) -> list[tuple[bytes, bytes]]:
    values = {
        "limit": str(limit),
        "remaining": str(window.remaining(limit, now)),
        "reset": format_duration(window.seconds_until_empty(now)),
    }
    return [(f"x-ratelimit-{n}-{meter}".encode(), value.encode()) for n, value in values.items()]


def format_duration(seconds: float) -> str:
    """Return a duration in the form of OpenAI's headers (Go's): `6m0s`, `1.5s`, `120ms`, `0s`."""
    milliseconds = round(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds / 1000, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
