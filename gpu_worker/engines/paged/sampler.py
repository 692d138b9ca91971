"""Logits to tokens: each row by its own rules, its randomness a function of seed and position.

The draw inverts the cumulative distribution in vocabulary order. In order of rank, two near-equal
logits that rounding swaps would move every boundary behind them; here they move none. So a sequence
gets the same tokens alone, in any batch, and on the worker that resumes it.

The order is vLLM's: what shapes a row (a grammar, bias, penalties), temperature, min-p, top-k, then
top-p as a share of what top-k has left.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import log

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_worker.engines.device_transfer import to_device, to_host
from streams.messages import Sampling

CANDIDATES = 1024  # looked at first; sorting a whole vocabulary of 262144 takes 13 ms a row
STRIDE = 512
CPU_ELEMENTS = 1 << 22  # at once: malloc reuses buffers of this size, larger ones fault in anew


def draw_uniform(seed: int, position: int) -> float:
    """A draw from [0, 1) that depends on nothing else."""
    digest = blake2b(b"%d:%d" % (seed, position), digest_size=7).digest()
    return int.from_bytes(digest, "little") / 2**56


@dataclass(frozen=True)
class RowSampling:
    """How to choose one row's token. `shape` first changes its float logits in place."""

    sampling: Sampling
    uniform: float = 0.0
    logits_processor: Callable[[Tensor], None] | None = None

    @property
    def is_argmax_only(self) -> bool:
        """Whether the highest logit, of whatever type, is all that matters."""
        sampling = self.sampling
        return (
            sampling.temperature == 0
            and self.logits_processor is None
            and sampling.logprobs is None
        )


@dataclass(frozen=True)
class SampledToken:
    """A row's token, None where its logits are not numbers, with log probabilities if asked for."""

    token: int | None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


def sample(logits: Tensor, choices: list[RowSampling]) -> list[SampledToken]:
    """Choose a token for each row of `logits` `[rows, vocabulary]`, of any floating type."""
    rows = len(choices) if logits.is_cuda else max(1, CPU_ELEMENTS // logits.shape[-1])
    starts = range(0, len(choices), max(1, rows))
    return [s for i in starts for s in _sample_rows(logits[i : i + rows], choices[i : i + rows])]


def _sample_rows(logits: Tensor, choices: list[RowSampling]) -> list[SampledToken]:
    shaped = [i for i, c in enumerate(choices) if c.logits_processor]
    if not all(c.is_argmax_only for c in choices):
        logits = logits.to(torch.float32, copy=bool(shaped))
    raw = _process_logits(logits, choices, shaped)
    return _choose_tokens(logits, raw, choices, CANDIDATES)


def _choose_tokens(
    logits: Tensor, raw: dict[int, Tensor], choices: list[RowSampling], candidates: int
) -> list[SampledToken]:
    """Choose by shaped `logits`; `raw` rows are those before their shape.

    Nothing is read from the device but all results at the end, at once. Rows whose cuts reach
    beyond the highest `candidates` are chosen again.
    """
    highest, tokens = _argmax(logits)
    enough = torch.ones_like(tokens, dtype=torch.bool)
    drawn = [i for i, c in enumerate(choices) if c.sampling.temperature > 0]
    if drawn:
        at = _row_index(drawn, logits)
        tokens[at], enough[at] = _draw(logits[at], [choices[i] for i in drawn], candidates)
    asked = [i for i, c in enumerate(choices) if c.sampling.logprobs is not None]
    logprobs = _gather_logprobs(logits, raw, choices, tokens, asked) if asked else ()
    picked, sound, fine, *told = to_host(tokens, highest.isfinite(), enough, *logprobs)
    sampled = [SampledToken(int(t) if s else None) for t, s in zip(picked, sound, strict=True)]
    for place, i in enumerate(asked):
        if sampled[i].token is not None:
            sampled[i] = _with_logprobs(sampled[i], choices[i], place, *told)
    if more := [i for i, s in enumerate(sampled) if s.token is not None and not fine[i]]:
        own = {place: raw[i] for place, i in enumerate(more) if i in raw}
        rules = [choices[i] for i in more]
        again = _choose_tokens(logits[_row_index(more, logits)], own, rules, 16 * candidates)
        for i, found in zip(more, again, strict=True):
            sampled[i] = found
    return sampled


def _row_index(rows: list[int], like: Tensor) -> Tensor:
    return to_device(rows, torch.long, like.device)


def _column(values: list[float], like: Tensor) -> Tensor:
    return to_device(values, like.dtype, like.device)[:, None]


def _process_logits(
    logits: Tensor, choices: list[RowSampling], rows: list[int]
) -> dict[int, Tensor]:
    """Shape `rows` in place; how those of them were whose log probabilities are wanted."""
    raw = {i: logits[i].clone() for i in rows if choices[i].sampling.logprobs is not None}
    for i in rows:
        if shape := choices[i].logits_processor:
            shape(logits[i])
    return raw


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
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


def _draw(logits: Tensor, choices: list[RowSampling], candidates: int) -> tuple[Tensor, Tensor]:
    """Tokens `[rows]`, and whether `candidates` were enough for each. Overwrites `logits`."""
    logits /= _column([c.sampling.temperature for c in choices], logits)
    _apply_min_p(logits, choices)
    bound, enough = _top_k_top_p_bounds(logits, choices, candidates)
    weights = logits.softmax(-1)
    if bound is not None:
        weights.masked_fill_(logits < bound, 0)
    return _invert_cdf(weights, _column([c.uniform for c in choices], logits)), enough


def _apply_min_p(logits: Tensor, choices: list[RowSampling]) -> None:
    """Apply min-p: drop, in place, what is less likely than that share of the likeliest."""
    rows = [i for i, c in enumerate(choices) if c.sampling.min_p > 0]
    if rows:
        below = _column([log(choices[i].sampling.min_p) for i in rows], logits)
        at = _row_index(rows, logits)
        kept = logits[at]
        logits[at] = kept.masked_fill(kept < kept.amax(-1, keepdim=True) + below, -torch.inf)


def _top_k_top_p_bounds(
    logits: Tensor, choices: list[RowSampling], candidates: int
) -> tuple[Tensor | None, Tensor]:
    """The lowest logit that top-k and top-p keep, per row `[rows, 1]`; None when nothing is cut.

    And whether it was among the `candidates`, `[rows]`.
    """
    enough = torch.ones_like(logits[:, 0], dtype=torch.bool)
    cut = [i for i, c in enumerate(choices) if c.sampling.top_k > 0 or c.sampling.top_p < 1]
    if not cut:
        return None, enough
    bounds, at = torch.full_like(logits[:, :1], -torch.inf), _row_index(cut, logits)
    bounds[at], enough[at] = _bounds_of_cut_rows(logits[at], [choices[i] for i in cut], candidates)
    return bounds, enough


def _bounds_of_cut_rows(
    logits: Tensor, choices: list[RowSampling], candidates: int
) -> tuple[Tensor, Tensor]:
    """As `_bounds`, for rows that are all cut."""
    vocabulary = logits.shape[-1]
    count = min(candidates, vocabulary)
    top_k = [c.sampling.top_k if c.sampling.top_k > 0 else vocabulary for c in choices]
    ranks_kept = _row_index(top_k, logits)[:, None]
    top_p = _column([c.sampling.top_p for c in choices], logits)
    best = logits.topk(count, -1).values
    ranks = torch.arange(count, device=logits.device)
    first = best.masked_fill(ranks >= ranks_kept, -torch.inf).logsumexp(-1, keepdim=True)
    uncut = ranks_kept >= vocabulary
    weights = (best - torch.where(uncut, logits.logsumexp(-1, keepdim=True), first)).exp()
    enough = (ranks_kept <= count) | uncut & (weights.sum(-1, keepdim=True) >= top_p)
    keep = (weights.cumsum(-1) - weights < top_p) & (ranks < ranks_kept)
    bounds = best.gather(-1, keep.sum(-1, keepdim=True).clamp(min=1) - 1)
    return bounds, enough[:, 0] | (count == vocabulary)


def _invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
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
    tokens = stride * STRIDE + _first_above(within, target - before)
    return tokens[:, 0].clamp(max=vocabulary - 1)  # beyond it leads only what is not a number


def _first_above(rising: Tensor, target: Tensor) -> Tensor:
    """The index of the first value above `target`; rounding never leads to one of no weight."""
    below_last = rising[:, -1:].nextafter(rising.new_zeros(()))
    found = torch.searchsorted(rising, target.clamp(min=0).minimum(below_last), right=True)
    return found.clamp(max=rising.shape[-1] - 1)


def _gather_logprobs(
    logits: Tensor,
    raw: dict[int, Tensor],
    choices: list[RowSampling],
    tokens: Tensor,
    rows: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities under the model's own distribution, before shape, temperature and cuts.

    Of each row's token `[rows]`; then the likeliest tokens and theirs, as many as any row asks for.
    """
    own = torch.stack([raw.get(i, logits[i]) for i in rows])
    own = own - own.logsumexp(-1, keepdim=True)
    top = max(choices[i].sampling.logprobs or 0 for i in rows)
    values, ids = own.topk(min(top, own.shape[-1]))
    return own.gather(-1, tokens[_row_index(rows, logits)][:, None]), ids, values


def _with_logprobs(
    sampled: SampledToken, choice: RowSampling, place: int,
    own: list[float], ids: list[float], values: list[float],
) -> SampledToken:  # fmt: skip
    """What `_logprobs` found for the row at `place` of those that asked."""
    width = len(ids) // len(own)
    row = slice(place * width, place * width + min(width, choice.sampling.logprobs or 0))
    top = [(int(token), value) for token, value in zip(ids[row], values[row], strict=True)]
    return replace(sampled, logprob=own[place], top_logprobs=top)
