"""Token ids of several inputs as one tensor, padded on the right."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class TokenizedInput:
    """Token ids; of a pair, also where the second text begins among them."""

    tokens: list[int]
    second_text_start: int | None = None


@dataclass(frozen=True)
class PaddedBatch:
    """`[rows, tokens]` of int64 each: ids; 1 for a token; 1 for a token of a second text."""

    ids: Tensor
    mask: Tensor
    type_ids: Tensor

    @property
    def last_positions(self) -> Tensor:
        """`[rows]`: where each row's last token is."""
        return self.mask.sum(-1) - 1

    def select_last(self, states: Tensor) -> Tensor:
        """`[rows, size]`: of `[rows, tokens, size]` the states at the last tokens."""
        return states[torch.arange(len(states), device=states.device), self.last_positions]


def pad_inputs(inputs: Sequence[TokenizedInput], device: torch.device) -> PaddedBatch:
    """Padding is masked, so its id does not matter: it is 0, which every vocabulary has."""
    ids = pad_sequence([torch.tensor(each.tokens) for each in inputs], batch_first=True)
    places = torch.arange(ids.shape[1])
    lengths = torch.tensor([[len(each.tokens)] for each in inputs])
    splits = torch.tensor([[_second_text_start(each)] for each in inputs])
    mask = places < lengths
    types = mask & (places >= splits)
    return PaddedBatch(ids.to(device), mask.long().to(device), types.long().to(device))


def _second_text_start(each: TokenizedInput) -> int:
    return len(each.tokens) if each.second_text_start is None else each.second_text_start
