"""Requests and tokens that arrive for one model, by priority, from its load reports. Pure."""

from dataclasses import dataclass

from fleet.signals.counter_rate import CounterRate
from streams.messages import Pressure, ServiceTime


@dataclass(frozen=True)
class AcceptedRate:
    """Accepted arrivals per second: requests, prompt tokens, and expected output tokens."""

    requests: float
    prompt_tokens: float
    output_tokens: float

    @property
    def mean_tokens(self) -> float | None:
        """Mean tokens of a request, prompt and output; None if none has arrived."""
        tokens = self.prompt_tokens + self.output_tokens
        return tokens / self.requests if self.requests else None


class ArrivalRates:
    """The arrivals of one model, as its dispatcher's leader counts them.

    A request is expected to generate the share of its allowed output that requests of the model
    have generated so far. `pressure` is the last report.
    """

    def __init__(self, pressure: Pressure, now: float, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._rates: dict[str, CounterRate] = {}
        self.record(pressure, now)

    def record(self, pressure: Pressure, now: float) -> None:
        """Take a report that was heard at `now`."""
        self.pressure, self.heard_at = pressure, now
        for priority, counted in pressure.arrived.items():
            rate = self._rates.setdefault(priority, CounterRate(self._window_seconds))
            rate.record(now, *counted)

    def rate(self, priority: str) -> AcceptedRate | None:
        """Return what arrives of a priority; None before the leader's second report."""
        counted = self._rates.get(priority)
        if counted is None or (found := counted.per_second) is None:
            return None
        requests, prompt, output = found
        share = (self.pressure.compute or ServiceTime()).output_share
        return AcceptedRate(requests, prompt, output * share)
