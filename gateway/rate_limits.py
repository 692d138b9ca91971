"""`x-ratelimit-*`: how an OpenAI client learns of its quotas per minute. Pure."""

from collections.abc import Iterable

from gateway.checks import PerMinute, Scope, Totals
from streams.usage import Meter
from streams.windows import Window

_UNUSED = Window(0, 0, 0.0)


class RateLimits:
    """The use of each quota per minute as this gateway last saw it; none seen: none used."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Scope, Meter], Window] = {}

    def see(self, check: PerMinute, totals: Totals, now: float, *, refused: bool) -> None:
        """Take in the totals of a request, which are without it if it was refused."""
        window = check.window(totals, now)
        self._seen[check.scope, check.meter] = window.less(check.amount) if refused else window

    def headers(self, scopes: Iterable[Scope], now: float) -> list[tuple[bytes, bytes]]:
        """For requests and for tokens, of the scope that has the least left."""
        limits = {Meter.REQUESTS: "requests_per_minute", Meter.TOKENS: "tokens_per_minute"}
        found: list[tuple[bytes, bytes]] = []
        for meter, quota in limits.items():
            bounded = [(getattr(s.limits, quota), self._window(s, meter)) for s in scopes]
            bounded = [(limit, window) for limit, window in bounded if limit is not None]
            if bounded:
                tightest = min(bounded, key=lambda each: each[1].remaining(each[0], now))
                found += _lines(meter, *tightest, now)
        return found

    def _window(self, scope: Scope, meter: Meter) -> Window:
        return self._seen.get((scope, meter), _UNUSED)


def _lines(meter: Meter, limit: int, window: Window, now: float) -> list[tuple[bytes, bytes]]:
    values = {
        "limit": str(limit),
        "remaining": str(window.remaining(limit, now)),
        "reset": duration(window.reset(now)),
    }
    return [(f"x-ratelimit-{n}-{meter}".encode(), value.encode()) for n, value in values.items()]


def duration(seconds: float) -> str:
    """As OpenAI writes one, after Go: `6m0s`, `1.5s`, `120ms`, `0s`."""
    milliseconds = round(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds / 1000, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
