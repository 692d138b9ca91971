"""Step model: how long a step of an engine takes, by the tokens and sequences in it."""

from dataclasses import dataclass, replace
from math import isfinite


@dataclass(frozen=True)
class StepModel:
    """Durations of an engine's steps and what fits into the engine; defaults: A10G with a 7B model.

    A step that decodes takes `step_ms + sequence_ms * batch + context_us * tokens in their KV`; one
    that prefills takes `prefill_ms + token_ms * tokens` more. `kv_tokens` and `max_sequences` are
    what fits in the engine, `max_batch_tokens` what fits in one step.
    """

    step_ms: float = 31.2
    sequence_ms: float = 0.28
    context_us: float = 0.4
    prefill_ms: float = 10.0
    token_ms: float = 0.26
    kv_tokens: int = 10_000
    max_sequences: int = 64
    max_batch_tokens: int = 512

    def __post_init__(self) -> None:
        """Raise ValueError for times or sizes that no engine has."""
        for name, value in vars(self).items():
            least = 0 if name.endswith(("_ms", "_us")) else 1
            if not (isfinite(value) and value >= least):
                raise ValueError(f"{name} is {value}: it is a number of {least} or more")

    def step_seconds(self, decoding: int, context_tokens: int, prefill_tokens: int) -> float:
        """Return the seconds that one step takes; 0 for an empty step.

        In the step, `decoding` sequences with `context_tokens` tokens of KV in all generate one
        token each, and `prefill_tokens` prompt tokens are computed.
        """
        ms = 0.0
        if decoding:
            ms += self.step_ms + self.sequence_ms * decoding
            ms += self.context_us / 1000 * context_tokens
        if prefill_tokens:
            ms += self.prefill_ms + self.token_ms * prefill_tokens
        return ms / 1000

    def speed_up(self, factor: float) -> "StepModel":
        """Return a model of the same sizes with all times divided by `factor`."""
        return replace(
            self,
            step_ms=self.step_ms / factor,
            sequence_ms=self.sequence_ms / factor,
            context_us=self.context_us / factor,
            prefill_ms=self.prefill_ms / factor,
            token_ms=self.token_ms / factor,
        )
