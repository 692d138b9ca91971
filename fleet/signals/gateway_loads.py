"""Load of each gateway, measured by its beats. Pure."""

from fleet.signals.counter_rate import CounterRate
from fleet.signals.signal_report import GatewaySignals
from streams.coordination.gateway_beats import GatewayBeat

HEARD_SECONDS = 5.0  # five beats


class GatewayLoads:
    """The gateways that were heard within `HEARD_SECONDS`. Times are seconds of one clock."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._beats: dict[str, GatewayBeat] = {}
        self._rates: dict[str, CounterRate] = {}

    def record(self, beat: GatewayBeat, now: float) -> None:
        """Take a beat that was heard at `now`."""
        self._beats[beat.gateway] = beat
        rate = self._rates.setdefault(beat.gateway, CounterRate(self._window_seconds))
        rate.record(now, beat.requests, beat.preparation_seconds)

    def expire(self, now: float) -> None:
        """Forget gateways that are silent."""
        for name in [n for n, rate in self._rates.items() if now - rate.last_at >= HEARD_SECONDS]:
            del self._beats[name], self._rates[name]

    def measure(self) -> list[GatewaySignals]:
        """Return the load of each gateway, by name."""
        return [self._measure(self._beats[name]) for name in sorted(self._beats)]

    def _measure(self, beat: GatewayBeat) -> GatewaySignals:
        rate = self._rates[beat.gateway]
        per_second, growth = rate.per_second, rate.growth
        return GatewaySignals(
            gateway=beat.gateway,
            draining=beat.draining,
            connections=beat.connections,
            requests_per_second=per_second[0] if per_second else None,
            preparation_seconds=growth[1] / growth[0] if growth and growth[0] else None,
            loop_lag_seconds=beat.loop_lag_seconds,
        )
