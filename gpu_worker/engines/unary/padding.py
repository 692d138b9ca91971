"""Makes one tensor of the token ids of several inputs, padded on the right."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class TokenizedInput:
    """An input's token ids and, for a pair of texts, the index at which the second text begins."""

    tokens: list[int]
    second_text_start: int | None = None


@dataclass(frozen=True)
class PaddedBatch:
    """The inputs of one micro-batch, padded on the right, as int64 tensors `[rows, tokens]`.

    `ids` are token ids, 0 in the padding. `mask` is 1 for a token and 0 for padding; `type_ids` is
    1 for tokens of a second text, else 0.
    """

    ids: Tensor
    mask: Tensor
    type_ids: Tensor

    @property
    def last_positions(self) -> Tensor:
        """Index of each row's last token that is not padding, `[rows]`."""
        return self.mask.sum(-1) - 1

    def select_last(self, states: Tensor) -> Tensor:
        """Return the states at each row's last token: `[rows, tokens, size]` to `[rows, size]`."""
        return states[torch.arange(len(states), device=states.device), self.last_positions]


def pad_inputs(inputs: Sequence[TokenizedInput], device: torch.device) -> PaddedBatch:
    """Return inputs as one batch on a device, each padded on the right to the longest.

    Padding is masked, so its id does not matter: it is 0, which every vocabulary has. There must be
    at least one input.
    """
    ids = pad_sequence([torch.tensor(each.tokens) for each in inputs], batch_first=True)
    columns = torch.arange(ids.shape[1])
    lengths = torch.tensor([[len(each.tokens)] for each in inputs])
    splits = torch.tensor([[_second_text_start(each)] for each in inputs])
    mask = columns < lengths
    types = mask & (columns >= splits)
    return PaddedBatch(ids.to(device), mask.long().to(device), types.long().to(device))


def _second_text_start(each: TokenizedInput) -> int:
    return len(each.tokens) if each.second_text_start is None else each.second_text_start
