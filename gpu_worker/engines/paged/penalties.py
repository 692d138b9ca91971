"""Bias, repetition, frequency and presence penalties on the logits of one sequence.

They are applied before the temperature and in this order, as vLLM does. The repetition penalty
counts prompt and output alike, the others the output alone. All of it is a function of the tokens
so far, so a later attempt continues exactly. Pure.
"""

import torch
from torch import Tensor

from gpu_worker.engines.device_transfer import to_device
from streams.messages import ResolvedSampling

_INITIAL_CAPACITY = 64


class Penalties:
    """The logit bias and the repetition, frequency and presence penalties of one sequence.

    Keeps on the device which tokens have occurred and how often. The caller counts each generated
    token, and applies the penalties to the logits before each sampling.
    """

    def __init__(self, sampling: ResolvedSampling, prompt: list[int], device: torch.device) -> None:
        self._sampling = sampling
        self._index_by_token: dict[int, int] = {}
        self._ids = torch.empty(_INITIAL_CAPACITY, dtype=torch.long, device=device)
        self._counts = torch.zeros(_INITIAL_CAPACITY, device=device)
        biased = sampling.logit_bias
        self._biased = to_device([t for t, _ in biased], torch.long, device)
        self._bias = to_device([float(b) for _, b in biased], torch.float32, device)
        if sampling.repetition_penalty != 1:
            self._index_tokens(prompt)

    def count_token(self, token: int) -> None:
        """Count one generated token, so that the next `apply` penalises it."""
        self.count_tokens([token])

    def count_tokens(self, tokens: list[int]) -> None:
        """Count generated tokens, so that the next `apply` penalises them.

        Many tokens in one call cost little more than one.
        """
        self._index_tokens(tokens)
        indices = to_device(
            [self._index_by_token[token] for token in tokens], torch.long, self._ids.device
        )
        self._counts.index_add_(0, indices, torch.ones_like(indices, dtype=self._counts.dtype))

    def apply(self, row: Tensor) -> None:
        """Add the logit bias and the penalties of the tokens counted so far to `row`, in place.

        `row` holds one row of float logits, `[vocabulary]`.
        """
        sampling = self._sampling
        if len(self._biased):
            row[self._biased] += self._bias
        ids = self._ids[: len(self._index_by_token)]
        counts = self._counts[: len(self._index_by_token)]
        values = row[ids]
        if (factor := sampling.repetition_penalty) != 1:
            values = torch.where(values > 0, values / factor, values * factor)
        values -= sampling.frequency_penalty * counts
        values -= sampling.presence_penalty * (counts > 0)
        row[ids] = values

    def _index_tokens(self, tokens: list[int]) -> None:
        """Give each new token an index in the tensors of ids and counts."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._index_by_token]
        start = len(self._index_by_token)
        self._index_by_token.update(zip(new, range(start, start + len(new)), strict=True))
        if (need := len(self._index_by_token)) > len(self._ids):
            extra = max(need, 2 * len(self._ids)) - len(self._ids)
            self._ids = torch.cat([self._ids, self._ids.new_empty(extra)])
            self._counts = torch.cat([self._counts, self._counts.new_zeros(extra)])
        if new:
            self._ids[start:need] = to_device(new, torch.long, self._ids.device)


def build_penalties(
    sampling: ResolvedSampling, prompt: list[int], generated: list[int], device: torch.device
) -> Penalties | None:
    """Return a sequence's penalties with its `generated` tokens counted.

    None if the sampling parameters ask for no bias and no penalty.
    """
    neutral = (
        sampling.repetition_penalty == 1
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and not sampling.logit_bias
    )
    if neutral:
        return None
    penalties = Penalties(sampling, prompt, device)
    if generated:
        penalties.count_tokens(generated)
    return penalties
