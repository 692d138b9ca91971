"""Logits to tokens: each row by its own rules, its randomness a function of seed and position.

The draw inverts the cumulative distribution in vocabulary order. In order of rank, two near-equal
logits that rounding swaps would move every boundary behind them; here they move none. So a sequence
gets the same tokens alone, in any batch, and on the worker that resumes it.

The order is vLLM's: what shapes a row (a grammar, bias, penalties), temperature, min-p, top-k and
top-p.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log

import torch
from torch import Tensor
from torch.nn.functional import pad

from streams.messages import Sampling

CANDIDATES = 1024  # looked at first; sorting a whole vocabulary of 262144 takes 13 ms a row
STRIDE = 512
CPU_ELEMENTS = 1 << 22  # at once: malloc reuses buffers of this size, larger ones fault in anew


def uniform(seed: int, position: int) -> float:
    """A draw from [0, 1) that depends on nothing else."""
    digest = blake2b(b"%d:%d" % (seed, position), digest_size=7).digest()
    return int.from_bytes(digest, "little") / 2**56


@dataclass(frozen=True)
class Choice:
    """How to choose one row's token. `shape` first changes its float logits in place."""

    sampling: Sampling
    uniform: float = 0.0
    shape: Callable[[Tensor], None] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the highest logit, of whatever type, is all that matters."""
        sampling = self.sampling
        return sampling.temperature == 0 and self.shape is None and sampling.logprobs is None


@dataclass(frozen=True)
class Sampled:
    """A row's token, None where its logits are not numbers, with log probabilities if asked for."""

    token: int | None
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


def sample(logits: Tensor, choices: list[Choice]) -> list[Sampled]:
    """Choose a token for each row of `logits` `[rows, vocabulary]`, of any floating type."""
    rows = len(choices) if logits.is_cuda else max(1, CPU_ELEMENTS // logits.shape[-1])
    starts = range(0, len(choices), max(1, rows))
    return [s for i in starts for s in _sample(logits[i : i + rows], choices[i : i + rows])]


def _sample(logits: Tensor, choices: list[Choice]) -> list[Sampled]:
    shaped = [i for i, c in enumerate(choices) if c.shape]
    if not all(c.is_plain for c in choices):
        logits = logits.to(torch.float32, copy=bool(shaped))
    raw = _shape(logits, choices, shaped)
    highest, tokens = _highest(logits)
    sound = highest.isfinite().tolist()
    rows = [i for i, c in enumerate(choices) if c.sampling.temperature > 0 and sound[i]]
    if rows:
        tokens[rows] = _draw(logits[rows], [choices[i] for i in rows])
    picked = zip(tokens.tolist(), sound, strict=True)
    sampled = [Sampled(token if fine else None) for token, fine in picked]
    for i, choice in enumerate(choices):
        if choice.sampling.logprobs is not None and sampled[i].token is not None:
            sampled[i] = _with_logprobs(
                raw.get(i, logits[i]), sampled[i].token, choice.sampling.logprobs
            )
    return sampled


def _shape(logits: Tensor, choices: list[Choice], rows: list[int]) -> dict[int, Tensor]:
    """Shape `rows` in place; how those of them were whose log probabilities are wanted."""
    raw = {i: logits[i].clone() for i in rows if choices[i].sampling.logprobs is not None}
    for i in rows:
        if shape := choices[i].shape:
            shape(logits[i])
    return raw


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each row and its first place; NaN where there is one.

    Of which stride it is comes first: on a CPU values are found in half the time of places.
    """
    whole = logits.shape[-1] // STRIDE * STRIDE
    if not whole:
        highest, tokens = logits.max(-1)
        return highest, tokens
    peaks = logits[:, :whole].view(len(logits), -1, STRIDE).amax(-1)
    if whole < logits.shape[-1]:
        peaks = torch.cat([peaks, logits[:, whole:].amax(-1, keepdim=True)], -1)
    highest, stride = peaks.max(-1)
    first = (stride * STRIDE).clamp(max=logits.shape[-1] - STRIDE)
    within = first[:, None] + torch.arange(STRIDE, device=logits.device)
    return highest, first + logits.gather(-1, within).argmax(-1)


def _draw(logits: Tensor, choices: list[Choice]) -> Tensor:
    column = logits.new_tensor
    logits /= column([[c.sampling.temperature] for c in choices])
    _cut_unlikely(logits, choices)
    bound = _bounds(logits, choices)
    weights = logits.softmax(-1)
    if bound is not None:
        weights.masked_fill_(logits < bound, 0)
    return _invert(weights, column([[c.uniform] for c in choices]))


def _cut_unlikely(logits: Tensor, choices: list[Choice]) -> None:
    """Apply min-p: drop, in place, what is less likely than that share of the likeliest."""
    rows = [i for i, c in enumerate(choices) if c.sampling.min_p > 0]
    if rows:
        below = logits.new_tensor([[log(choices[i].sampling.min_p)] for i in rows])
        kept = logits[rows]
        logits[rows] = kept.masked_fill(kept < kept.amax(-1, keepdim=True) + below, -torch.inf)


def _bounds(logits: Tensor, choices: list[Choice]) -> Tensor | None:
    """The lowest logit that top-k and top-p keep, per row `[rows, 1]`; None when nothing is cut."""
    cut = [i for i, c in enumerate(choices) if c.sampling.top_k > 0 or c.sampling.top_p < 1]
    if not cut:
        return None
    bounds = torch.full_like(logits[:, :1], -torch.inf)
    bounds[cut] = _kept(logits[cut], [choices[i] for i in cut])
    return bounds


def _kept(logits: Tensor, choices: list[Choice], candidates: int = CANDIDATES) -> Tensor:
    """As `_bounds`, looking at the highest `candidates`, and at more for rows that need more."""
    vocabulary = logits.shape[-1]
    top_k = [c.sampling.top_k if c.sampling.top_k > 0 else vocabulary for c in choices]
    ranks_kept = torch.tensor(top_k, device=logits.device)[:, None]
    top_p = logits.new_tensor([[c.sampling.top_p] for c in choices])
    total = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(min(candidates, vocabulary), -1).values
    enough = ((best - total).exp().sum(-1, keepdim=True) >= top_p) | (ranks_kept <= best.shape[-1])
    weights = (best - total).exp()
    ranks = torch.arange(best.shape[-1], device=logits.device)
    keep = (weights.cumsum(-1) - weights < top_p) & (ranks < ranks_kept)
    bounds = best.gather(-1, keep.sum(-1, keepdim=True).clamp(min=1) - 1)
    more = [row for row, fine in enumerate(enough[:, 0].tolist()) if not fine]
    if more:
        bounds[more] = _kept(logits[more], [choices[i] for i in more], 16 * candidates)
    return bounds


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds `uniforms` of the total.

    Summed in strides, then within one: faster than one long sum, and closer.
    """
    rows, vocabulary = weights.shape
    if short := -vocabulary % STRIDE:
        weights = pad(weights, (0, short))
    weights = weights.view(rows, -1, STRIDE)
    sums = weights.sum(-1)
    upto = sums.cumsum(-1)
    target = uniforms * upto[:, -1:]
    stride = _first_above(upto, target)
    before = (upto - sums).gather(-1, stride)
    within = weights[torch.arange(rows, device=weights.device), stride[:, 0]].cumsum(-1)
    return (stride * STRIDE + _first_above(within, target - before))[:, 0]


def _first_above(rising: Tensor, target: Tensor) -> Tensor:
    """The index of the first value above `target`; rounding never leads to one of no weight."""
    below_last = rising[:, -1:].nextafter(rising.new_zeros(()))
    return torch.searchsorted(rising, target.clamp(min=0).minimum(below_last), right=True)


def _with_logprobs(logits: Tensor, token: int | None, top: int) -> Sampled:
    """Log probabilities under the model's own distribution, before shape, temperature and cuts."""
    assert token is not None
    total = logits.logsumexp(-1)
    values, ids = (logits - total).topk(min(top, len(logits)))
    likeliest = list(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(logits[token] - total), likeliest)
