"""A sequence with all that one engine keeps of it: state, text, seed, penalties, grammar, end."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gpu_worker.engines.detokenizer import REPLACEMENT_CHARACTER, TextStream
from gpu_worker.engines.engine import FinishReason, Sequence
from gpu_worker.engines.paged.batch.block_pool import blocks_for
from gpu_worker.engines.paged.batch.sequence_state import SequenceState
from gpu_worker.engines.paged.grammar_compiler import GrammarMatcher
from gpu_worker.engines.paged.penalties import build_penalties
from gpu_worker.engines.paged.sampler import RowSampling, SampledToken, draw_uniform
from gpu_worker.engines.seeds import derive_seed
from gpu_worker.engines.sequence_limits import count_reserved_tokens
from gpu_worker.engines.token_bytes import token_bytes
from streams import prefix_hashes
from streams.messages import LEAST_LOGPROB, Logprob
from streams.partial_characters import spell_bytes


@dataclass(frozen=True)
class TokenVocabulary:
    """A tokeniser, and the ids that end a sequence."""

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
        """Return a token's log probability with the likeliest others; None if not wanted."""
        if sampled.logprob is None or sampled.token is None:
            return None
        top = [
            (other, self.decode_token(other), max(value, LEAST_LOGPROB))
            for other, value in sampled.top_logprobs
        ]
        logprob = max(sampled.logprob, LEAST_LOGPROB)
        return [Logprob(sampled.token, self.decode_token(sampled.token), logprob, top)]


class GeneratingSequence:
    """A sequence that generates, starting behind its `generated` tokens.

    Those come from an earlier attempt, which has sent their text; it is not returned again.
    """

    def __init__(
        self, sequence: Sequence, vocabulary: TokenVocabulary, device: torch.device
    ) -> None:
        sampling, self.sequence, self._eos_ids = sequence.sampling, sequence, vocabulary.eos_ids
        salt = prefix_hashes.make_salt(
            sequence.tenant, sequence.adapter.digest if sequence.adapter else ""
        )
        tokens = sequence.prompt + sequence.generated
        self.state = SequenceState(sequence.request_id, tokens, salt, sequence.priority)
        self.matcher: GrammarMatcher | None = None
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
        """The most blocks that the sequence can come to need."""
        return blocks_for(count_reserved_tokens(self.sequence))

    @property
    def cached_tokens(self) -> int:
        """The number of the prompt's tokens that were found in the prefix cache."""
        return min(self.state.hit_tokens, len(self.sequence.prompt))

    def row_sampling(self) -> RowSampling:
        """Return how the sampler is to choose the next token."""
        sampling = self.sequence.sampling
        is_random = sampling.temperature > 0
        processor = self._process_logits if self.matcher or self._penalties else None
        return RowSampling(
            sampling,
            draw_uniform(self._seed, self.generated_count) if is_random else 0.0,
            processor,
        )

    def append_token(self, token: int) -> str:
        """Append the sampled token; returns the text that can be sent now.

        It may be empty while a character or a possible stop string is incomplete.
        """
        self.state.tokens.append(token)
        if self.matcher:
            self.matcher.advance([token])
        if self._penalties:
            self._penalties.count_token(token)
        return self._decode_text(token)

    def finish_reason(self) -> FinishReason | None:
        """Return why the sequence ends with its last token, or None if it goes on."""
        is_ended = self.generated_count > 0 and self._is_eos(self.state.tokens[-1])
        is_complete = self.matcher is not None and self.matcher.is_complete
        if is_ended or is_complete or self.text.stopped:
            return "stop"
        return "length" if self.generated_count >= self.sequence.sampling.max_tokens else None

    def _decode_text(self, token: int) -> str:
        return "" if self._is_eos(token) else self.text.push(token)

    def _is_eos(self, token: int) -> bool:
        return token in self._eos_ids and not self.sequence.sampling.ignore_eos

    def _process_logits(self, row: Tensor) -> None:
        if self.matcher:
            self.matcher.mask_logits(row)
        if self._penalties:
            self._penalties.apply(row)
