"""A sequence with all that one engine keeps of it: state, text, seed, penalties, grammar, end."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gpu_worker.engines.detokenizer import REPLACEMENT_CHARACTER, TextStream
from gpu_worker.engines.engine import FinishReason, Output, Sequence
from gpu_worker.engines.paged.batch.block_pool import blocks_for
from gpu_worker.engines.paged.batch.sequence_state import SequenceState
from gpu_worker.engines.paged.penalties import build_penalties
from gpu_worker.engines.paged.sampler import RowSampling, SampledToken, draw_uniform
from gpu_worker.engines.seeds import derive_seed
from gpu_worker.engines.sequence_limits import count_reserved_tokens
from gpu_worker.engines.token_bytes import token_bytes
from streams import prefix_hashes
from streams.logprob_token_text import spell_bytes
from streams.messages import LEAST_LOGPROB, Logprob, SamplingDefaults


@dataclass(frozen=True)
class TokenVocabulary:
    """A model's tokeniser, and the ids of the tokens that end its output."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]

    def decode_token(self, token: int) -> str:
        """Return a token's own text; that of a part of a character is `bytes:\\xf0\\x9f`."""
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        if REPLACEMENT_CHARACTER not in text:
            return text
        data = token_bytes(self.tokenizer.id_to_token(token) or "")
        return text if data is None or data.decode(errors="ignore") == text else spell_bytes(data)

    def to_logprobs(self, sampled: SampledToken) -> list[Logprob] | None:
        """Return, in a list of one, the sampled token's log probability and the likeliest tokens'.

        None if the request asked for no log probabilities, or if no token could be sampled.
        """
        if sampled.logprob is None or sampled.token is None:
            return None
        top = [
            (other, self.decode_token(other), max(value, LEAST_LOGPROB))
            for other, value in sampled.top_logprobs
        ]
        logprob = max(sampled.logprob, LEAST_LOGPROB)
        return [Logprob(sampled.token, self.decode_token(sampled.token), logprob, top)]


class TokenConstraint(Protocol):
    """A rule for the tokens that a sequence may generate next, such as a compiled grammar."""

    @property
    def is_complete(self) -> bool:
        """True once no further token is allowed."""

    @property
    def failure(self) -> str | None:
        """The reason why the constraint can no longer be followed; None while it can."""

    def mask_logits(self, row: Tensor) -> None:
        """Set the logits of tokens that are not allowed to minus infinity, in place."""

    def advance(self, tokens: Iterable[int]) -> None:
        """Go on behind `tokens`."""


class GeneratingSequence:
    """A sequence while it is in the engine: its tokens, text, seed, penalties and grammar.

    `sequence.generated` are tokens of an earlier attempt at the same request, which has sent their
    text. Generation continues after them, and their text is not returned again. `defaults` are for
    the sampling parameters that the request does not say. `state` is the scheduler's view of the
    sequence. `matcher` is None without a grammar, and until the grammar is compiled.
    """

    def __init__(
        self,
        sequence: Sequence,
        vocabulary: TokenVocabulary,
        device: torch.device,
        defaults: SamplingDefaults,
    ) -> None:
        self.sequence = sequence
        self._sampling = sampling = sequence.sampling.resolve(defaults)
        self._eos_ids = vocabulary.eos_ids
        self._end_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_ids)}
        salt = prefix_hashes.make_salt(
            sequence.tenant, sequence.adapter.digest if sequence.adapter else ""
        )
        tokens = sequence.prompt + sequence.generated
        self.state = SequenceState(sequence.request_id, tokens, salt, sequence.priority)
        self.matcher: TokenConstraint | None = None
        self._seed = derive_seed(sequence.request_id) if sampling.seed is None else sampling.seed
        self._penalties = build_penalties(sampling, sequence.prompt, sequence.generated, device)
        skip_special = sampling.skip_special_tokens
        self.text = TextStream(vocabulary.tokenizer, sequence.prompt, sampling.stop, skip_special)
        for token in sequence.generated:
            self._decode_text(token)

    @property
    def generated_count(self) -> int:
        """The number of generated tokens, those of earlier attempts included."""
        return len(self.state.tokens) - len(self.sequence.prompt)

    @property
    def max_blocks(self) -> int:
        """The most KV blocks it can need: those for the prompt and `max_tokens` of output."""
        return blocks_for(count_reserved_tokens(self.sequence))

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that were in the prefix cache when it was first admitted."""
        return min(self.state.hit_tokens, len(self.sequence.prompt))

    def row_sampling(self) -> RowSampling:
        """Return the sampling parameters, random draw and logits processor for the next token.

        The draw depends on the seed and on the number of generated tokens alone, so that every
        attempt draws the same. At temperature 0 it is 0 and not used.
        """
        is_random = self._sampling.temperature > 0
        is_processed = self.matcher or self._penalties or self._is_too_short
        processor = self._process_logits if is_processed else None
        return RowSampling(
            self._sampling,
            draw_uniform(self._seed, self.generated_count) if is_random else 0.0,
            processor,
        )

    def append_token(self, token: int) -> str:
        """Append the sampled token, and return the text that can be sent now.

        The text is empty while a character is incomplete or a stop string may have begun, and for
        an end-of-sequence token. A token that the grammar does not allow raises nothing and sets
        `matcher.failure`.
        """
        self.state.tokens.append(token)
        if self.matcher:
            self.matcher.advance([token])
        if self._penalties:
            self._penalties.count_token(token)
        return self._decode_text(token)

    def finish_reason(self) -> FinishReason | None:
        """Return why the sequence is finished with its last token, or None if it goes on.

        "stop" means that the token ends the sequence, that a stop string was found, or that the
        grammar allows nothing more; otherwise "length" means that `max_tokens` are generated.
        """
        is_ended = self.generated_count > 0 and self.state.tokens[-1] in self._end_ids
        is_complete = self.matcher is not None and self.matcher.is_complete
        if is_ended or is_complete or self.text.matched_stop:
            return "stop"
        return "length" if self.generated_count >= self.sequence.sampling.max_tokens else None

    def end_output(self, finish: FinishReason) -> Output:
        """Return the output that ends the sequence, without tokens or text."""
        return Output(
            self.sequence.request_id,
            finish=finish,
            cached=self.cached_tokens,
            matched_stop=self.text.matched_stop,
        )

    def _decode_text(self, token: int) -> str:
        return "" if token in self._end_ids else self.text.push(token)

    @property
    def _is_too_short(self) -> bool:
        """True while no token may be sampled that would end the output."""
        return self.generated_count < self.sequence.sampling.min_tokens

    def _process_logits(self, row: Tensor) -> None:
        if self.matcher:
            self.matcher.mask_logits(row)
        if self._penalties:
            self._penalties.apply(row)
        if self._is_too_short:
            row[sorted({*self._end_ids, *self._eos_ids})] = -torch.inf
