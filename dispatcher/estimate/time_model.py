"""What a request takes once it has been dispatched, learned from those that have ended. Pure."""

from dataclasses import dataclass
from math import sqrt

from dispatcher.estimate.moving_averages import DecayingLineFit, DecayingRatio
from streams.messages import ServiceTime

MEMORY_REQUESTS = 200  # requests
MIN_REQUESTS = 10  # requests, before anything is said about the next


@dataclass(frozen=True)
class CompletedRun:
    """How a request went; the seconds are from its dispatch to its first output, and from there."""

    prompt_tokens: int
    most_output: int
    output: int
    first_seconds: float
    rest_seconds: float


class TimeModel:
    """Seconds to the first output by prompt tokens, and from there by output tokens."""

    def __init__(self) -> None:
        self._seen = 0
        self._first = DecayingLineFit(MEMORY_REQUESTS)
        self._per_output_token = DecayingRatio(MEMORY_REQUESTS)
        self._output_share = DecayingRatio(MEMORY_REQUESTS, prior=1.0)
        self._squared_errors = DecayingRatio(MEMORY_REQUESTS)  # of what the line was wrong by
        self._total_seconds = DecayingRatio(MEMORY_REQUESTS)

    def add(self, ran: CompletedRun) -> None:
        self._seen += 1
        begins, rises = self._first.fit
        if self._seen > 1:
            expected = begins + rises * ran.prompt_tokens
            self._squared_errors.add((ran.first_seconds - expected) ** 2, 1)
        self._first.add(ran.prompt_tokens, ran.first_seconds)
        self._total_seconds.add(ran.first_seconds + ran.rest_seconds, 1)
        if ran.most_output:
            self._per_output_token.add(ran.rest_seconds, ran.output)
            self._output_share.add(ran.output, ran.most_output)

    def mean_seconds(self, running: int) -> float | None:
        """From dispatch to the end, on average; None until enough requests have ended.

        Short ones end first: that is enough if more have ended than are running.
        """
        return None if self._seen < max(MIN_REQUESTS, running) else self._total_seconds.value

    @property
    def compute(self) -> ServiceTime | None:
        """None until enough requests have ended."""
        if self._seen < MIN_REQUESTS:
            return None
        base, per_prompt_token = self._first.fit
        return ServiceTime(
            base,
            per_prompt_token,
            self._per_output_token.value,
            self._output_share.value,
            sqrt(self._squared_errors.value),
        )
