"""Run times of requests from their dispatch, learned from those that have ended. Pure."""

from dataclasses import dataclass
from math import sqrt

from dispatcher.estimate.moving_averages import DecayingLineFit, DecayingRatio
from streams.messages import ServiceTime

MEMORY_REQUESTS = 200  # about so many requests count
MIN_REQUESTS = 10  # no estimate is given before so many have ended


@dataclass(frozen=True)
class CompletedRun:
    """The times and tokens of one request that ran to its end, from which `TimeModel` learns.

    `first_seconds` are from its dispatch to its first output, `rest_seconds` from there to its end.
    `output` is the number of tokens that it generated; `most_output` is the number that it was
    allowed to generate, 0 if it generates none.
    """

    prompt_tokens: int
    most_output: int
    output: int
    first_seconds: float
    rest_seconds: float


class TimeModel:
    """Predicts how long a model's requests run, from about the last 200 that ran to their end.

    It learns the seconds from dispatch to the first output, as a line over prompt tokens, and the
    seconds per output token after that.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._first = DecayingLineFit(MEMORY_REQUESTS)
        self._per_output_token = DecayingRatio(MEMORY_REQUESTS)
        self._output_share = DecayingRatio(MEMORY_REQUESTS, prior=1.0)
        self._squared_errors = DecayingRatio(MEMORY_REQUESTS)  # of the line's predictions

    def add(self, run: CompletedRun) -> None:
        """Learn from one completed request; earlier ones then count a little less."""
        self._seen += 1
        base, per_prompt_token = self._first.fit
        if self._seen > 1:
            expected = base + per_prompt_token * run.prompt_tokens
            self._squared_errors.add((run.first_seconds - expected) ** 2, 1)
        self._first.add(run.prompt_tokens, run.first_seconds)
        if run.most_output:
            self._per_output_token.add(run.rest_seconds, run.output)
            self._output_share.add(run.output, run.most_output)

    @property
    def compute(self) -> ServiceTime | None:
        """The learned times, in the form in which gateways receive them.

        None until `MIN_REQUESTS` (10) requests have ended.
        """
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
