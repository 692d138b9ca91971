"""Step times of an engine, and what follows for a full batch of like requests. Pure.

A step is one forward pass, in which every decoding request gets one token; prompts are computed in
steps, too, and hold up all requests in them. The times of a step are taken to be linear in what is
in it, which is how `simulation/step_model.py` has it.
"""

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True)
class RequestShape:
    """Tokens of the prompt and of the output of a request; means of many need not be whole."""

    prompt_tokens: float
    output_tokens: float

    @property
    def tokens(self) -> float:
        """Tokens that a request holds in the KV cache at its end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_context(self) -> float:
        """Tokens that it holds on average while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class CapacityGoals:
    """The longest seconds to the first token, and from one token to the next; None: any."""

    first_token_seconds: float | None = None
    token_seconds: float | None = None


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step by what is in it, and seconds of a request outside of steps.

    A step takes `step_seconds + sequence_seconds * decoding requests + context_token_seconds *
    tokens in their KV`, and for each prompt `prefill_seconds + prompt_token_seconds * its tokens`
    more. `latency_seconds` is what each request waits beside that, however full the batch.
    """

    latency_seconds: float = 0.0
    step_seconds: float = 0.0
    sequence_seconds: float = 0.0
    context_token_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prompt_token_seconds: float = 0.0

    def decode_seconds(self, batch: float, shape: RequestShape) -> float:
        """Return the seconds of a step in which `batch` requests of this shape decode."""
        context = self.context_token_seconds * shape.mean_context
        return self.step_seconds + batch * (self.sequence_seconds + context)

    def prompt_seconds(self, shape: RequestShape) -> float:
        """Return the seconds by which the prompt of one request prolongs steps."""
        return self.prefill_seconds + self.prompt_token_seconds * shape.prompt_tokens

    def token_seconds(self, batch: float, shape: RequestShape) -> float:
        """Return the mean seconds from one token to the next in a full batch.

        While a request decodes, each of the others in the batch ends once and gives way to another,
        whose prompt is computed.
        """
        interrupted = batch * self.prompt_seconds(shape) / shape.output_tokens
        return self.decode_seconds(batch, shape) + interrupted

    def first_token_seconds(self, batch: float, shape: RequestShape) -> float:
        """Return the mean seconds to the first token of a request with a free place in the batch.

        It waits for half of the step under way, and then for its own, with its prompt.
        """
        waited = self.token_seconds(batch, shape) / 2
        own = self.decode_seconds(batch, shape) + self.prompt_seconds(shape)
        return self.latency_seconds + waited + own

    def request_seconds(self, batch: float, shape: RequestShape) -> float:
        """Return the mean seconds for which a request has a place in a full batch."""
        more = max(0.0, shape.output_tokens - 1) * self.token_seconds(batch, shape)
        return self.first_token_seconds(batch, shape) + more

    def scaled(self, factor: float) -> Self:
        """Return these times, each multiplied by `factor`."""
        return replace(self, **{f.name: factor * getattr(self, f.name) for f in fields(self)})
