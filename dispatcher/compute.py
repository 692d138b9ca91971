"""What a request takes once it has been dispatched, learned from those that have ended. Pure."""

from dataclasses import dataclass
from math import sqrt

from dispatcher.averages import Line, Ratio
from streams.messages import Compute

MEMORY = 200  # requests
ENOUGH = 10  # requests, before anything is said about the next


@dataclass(frozen=True)
class Ran:
    """How a request went; the seconds are from its dispatch to its first output, and from there."""

    prompt_tokens: int
    most_output: int
    output: int
    first_seconds: float
    rest_seconds: float


class Learned:
    """Seconds to the first output by prompt tokens, and from there by output tokens."""

    def __init__(self) -> None:
        self._seen = 0
        self._first = Line(MEMORY)
        self._per_output_token = Ratio(MEMORY)
        self._output_share = Ratio(MEMORY, prior=1.0)
        self._squares = Ratio(MEMORY)  # of what the line was wrong by
        self._whole = Ratio(MEMORY)

    def add(self, ran: Ran) -> None:
        self._seen += 1
        begins, rises = self._first.line
        if self._seen > 1:
            expected = begins + rises * ran.prompt_tokens
            self._squares.add((ran.first_seconds - expected) ** 2, 1)
        self._first.add(ran.prompt_tokens, ran.first_seconds)
        self._whole.add(ran.first_seconds + ran.rest_seconds, 1)
        if ran.most_output:
            self._per_output_token.add(ran.rest_seconds, ran.output)
            self._output_share.add(ran.output, ran.most_output)

    def seconds(self, running: int) -> float | None:
        """From dispatch to the end, on average; None until enough requests have ended.

        Short ones end first: that is enough if more have ended than are running.
        """
        return None if self._seen < max(ENOUGH, running) else self._whole.value

    @property
    def compute(self) -> Compute | None:
        """None until enough requests have ended."""
        if self._seen < ENOUGH:
            return None
        base, per_prompt_token = self._first.line
        return Compute(
            base,
            per_prompt_token,
            self._per_output_token.value,
            self._output_share.value,
            sqrt(self._squares.value),
        )
