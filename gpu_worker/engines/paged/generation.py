"""One sequence in the engine: its run, its text, its randomness, and when it ends."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gpu_worker.detokenizer import TextStream
from gpu_worker.engine import Finish, Sequence
from gpu_worker.engines.paged.blocks import blocks_for
from gpu_worker.engines.paged.grammars import Matcher
from gpu_worker.engines.paged.penalties import penalties
from gpu_worker.engines.paged.run import Run
from gpu_worker.engines.paged.sampler import Choice, Sampled, uniform
from gpu_worker.limits import reserved
from gpu_worker.seeds import seed_of
from streams import marks
from streams.messages import Logprob


@dataclass(frozen=True)
class Vocabulary:
    """A tokeniser, and which of its ids end a sequence."""

    tokenizer: Tokenizer
    ends: frozenset[int]

    def text(self, token: int) -> str:
        """A token's own text; half a character is `\ufffd`."""
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return text

    def logprobs(self, sampled: Sampled) -> list[Logprob] | None:
        """The log probability of a sampled token and of the likeliest others, if asked for."""
        if sampled.logprob is None or sampled.token is None:
            return None
        top = [(other, self.text(other), value) for other, value in sampled.top]
        return [Logprob(sampled.token, self.text(sampled.token), sampled.logprob, top)]


class Generation:
    """A sequence behind its `generated` tokens, whose text an earlier attempt has sent."""

    def __init__(self, sequence: Sequence, vocabulary: Vocabulary, device: torch.device) -> None:
        sampling, self.sequence, self._ends = sequence.sampling, sequence, vocabulary.ends
        salt = marks.salt(sequence.tenant, sequence.adapter.digest if sequence.adapter else "")
        tokens = sequence.prompt + sequence.generated
        self.run = Run(sequence.request_id, tokens, salt, sequence.priority)
        self.matcher: Matcher | None = None
        self._seed = seed_of(sequence.request_id) if sampling.seed is None else sampling.seed
        self._penalties = penalties(sampling, sequence.prompt, sequence.generated, device)
        skip = sampling.skip_special_tokens
        self.text = TextStream(vocabulary.tokenizer, sequence.prompt, sampling.stop, skip)
        for token in sequence.generated:
            self._read(token)

    @property
    def generated(self) -> int:
        return len(self.run.tokens) - len(self.sequence.prompt)

    @property
    def blocks(self) -> int:
        """Blocks that it may come to need."""
        return blocks_for(reserved(self.sequence))

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were found in the prefix cache."""
        return min(self.run.restored, len(self.sequence.prompt))

    def choice(self) -> Choice:
        """How to choose the next token."""
        sampling = self.sequence.sampling
        draws = sampling.temperature > 0
        shape = self._shape if self.matcher or self._penalties else None
        return Choice(sampling, uniform(self._seed, self.generated) if draws else 0.0, shape)

    def push(self, token: int) -> str:
        """The next token was chosen; returns the text that is now certain."""
        self.run.tokens.append(token)
        if self.matcher:
            self.matcher.advance([token])
        if self._penalties:
            self._penalties.count(token)
        return self._read(token)

    def finish(self) -> Finish | None:
        """Why the sequence ends with the tokens that it has, if it does."""
        ended = self.generated > 0 and self._is_end(self.run.tokens[-1])
        complete = self.matcher is not None and self.matcher.complete
        if ended or complete or self.text.stopped:
            return "stop"
        return "length" if self.generated >= self.sequence.sampling.max_tokens else None

    def _read(self, token: int) -> str:
        return "" if self._is_end(token) else self.text.push(token)

    def _is_end(self, token: int) -> bool:
        return token in self._ends and not self.sequence.sampling.ignore_eos

    def _shape(self, row: Tensor) -> None:
        if self.matcher:
            self.matcher.mask(row)
        if self._penalties:
            self._penalties.apply(row)
