"""Checks a sequence before it joins a batch, so that a bad one fails alone and early.

Pure.
"""

from dataclasses import dataclass

from gpu_worker.engines.engine import EngineError, Sequence
from streams.errors import (
    BadRequest,
    ContextLengthExceeded,
    InputTooLong,
    TokenOutOfRange,
    UnsupportedValue,
)


def count_reserved_tokens(sequence: Sequence) -> int:
    """Return the most KV tokens that a sequence may come to occupy.

    These are its prompt and the most that it may generate, or the tokens of all its inputs.
    """
    if sequence.inputs:
        return sum(map(len, sequence.inputs))
    return len(sequence.prompt) + sequence.sampling.max_tokens


@dataclass(frozen=True)
class SequenceLimits:
    """The limits of one engine: token ids below `vocabulary`, prompt plus output within `tokens`.

    `grammars` and `adapters` tell whether the engine supports them. An engine that does not must
    refuse them: it would serve something else in their place.
    """

    vocabulary: int
    tokens: int
    grammars: bool = True
    adapters: bool = False

    def find_refusal(self, sequence: Sequence) -> EngineError | None:
        """Return the error for a sequence that cannot run on this engine; None for one that can.

        Nothing is raised. The first fault found decides: an adapter or a grammar that the engine
        does not support, a prompt or input that is empty or too long, or an unknown token id.
        """
        try:
            self._raise_if_invalid(sequence)
        except BadRequest as error:
            return EngineError(error.code, error.message)
        return None

    def _raise_if_invalid(self, sequence: Sequence) -> None:
        if sequence.adapter and not self.adapters:
            raise UnsupportedValue("the engine of this model serves no adapters", "model")
        lengths = [*map(len, sequence.inputs)] or [len(sequence.prompt)]
        longest = max(lengths)
        prompt, max_new = len(sequence.prompt), sequence.sampling.max_tokens
        if sequence.inputs and longest > self.tokens:
            where = f"input[{lengths.index(longest)}]"
            raise InputTooLong(where, longest, self.tokens, "the model")
        if not sequence.inputs and prompt + max_new > self.tokens:
            raise ContextLengthExceeded(prompt, max_new, self.tokens, "the model")
        if min(lengths) == 0:
            raise UnsupportedValue("an empty prompt or input has nothing to run on", "prompt")
        if sequence.sampling.grammar and not self.grammars:
            reason = "this model's engine cannot make its output follow a grammar"
            raise UnsupportedValue(reason, "response_format")
        self._raise_if_unknown_token(sequence)

    def _raise_if_unknown_token(self, sequence: Sequence) -> None:
        biased = [token for token, _ in sequence.sampling.logit_bias]
        for tokens in (sequence.prompt, sequence.generated, biased, *sequence.inputs):
            if tokens and (min(tokens) < 0 or max(tokens) >= self.vocabulary):
                unknown = next(t for t in tokens if not 0 <= t < self.vocabulary)
                raise TokenOutOfRange(
                    unknown, self.vocabulary, "input" if sequence.inputs else "prompt"
                )
