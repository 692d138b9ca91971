"""The sampler: logits to tokens, each row with its own parameters, random by seed and position.

The draw inverts the cumulative distribution in vocabulary order. In order of rank, two near-equal
logits that rounding swaps would move every boundary behind them; here they move none. So a sequence
gets the same tokens alone, in any batch, and on the worker that resumes it.

The order is vLLM's: logits processors (a grammar, bias, penalties), temperature, min-p, top-k, then
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
from streams.messages import ResolvedSampling

CANDIDATES = 1024  # highest logits to cut among; sorting a vocabulary of 262144 takes 13 ms a row
STRIDE = 512
CPU_ELEMENTS = 1 << 22  # logits at once: malloc reuses buffers of this size, larger ones fault in


def draw_uniform(seed: int, position: int) -> float:
    """Return a pseudo-random number from [0, 1) that depends on `seed` and `position` alone."""
    digest = blake2b(b"%d:%d" % (seed, position), digest_size=7).digest()
    return int.from_bytes(digest, "little") / 2**56


@dataclass(frozen=True)
class RowSampling:
    """The way to choose one row's token: parameters, a random number, a logits processor.

    `uniform` is the random draw from [0, 1), which is used unless the temperature is 0.
    `logits_processor` changes the row's float logits in place before anything else is done to them.
    """

    sampling: ResolvedSampling
    uniform: float = 0.0
    logits_processor: Callable[[Tensor], None] | None = None

    @property
    def is_argmax_only(self) -> bool:
        """True when the highest logit alone decides, so that the logits need not become float32.

        That is at temperature 0, without a logits processor and without log probabilities.
        """
        sampling = self.sampling
        return (
            sampling.temperature == 0
            and self.logits_processor is None
            and sampling.logprobs is None
        )


@dataclass(frozen=True)
class SampledToken:
    """The token chosen for one row; None if the row's highest logit is not finite.

    `logprob` is None and `top_logprobs` empty unless the request asked for them. Both are natural
    logarithms under the model's own distribution, before any processing. `top_logprobs` are pairs
    of token and log probability, likeliest first.
    """

    token: int | None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


def sample(logits: Tensor, samplings: list[RowSampling]) -> list[SampledToken]:
    """Choose a token for each row of logits by the `samplings` entry of the same index.

    `logits` is `[rows, vocabulary]`, of any floating type, and may be overwritten. The results are
    in the order of the rows. A row whose logits are not finite numbers raises nothing and gets the
    token None. Waits until the device has computed the results.
    """
    rows = len(samplings) if logits.is_cuda else max(1, CPU_ELEMENTS // logits.shape[-1])
    starts = range(0, len(samplings), max(1, rows))
    return [s for i in starts for s in _sample_rows(logits[i : i + rows], samplings[i : i + rows])]


def _sample_rows(logits: Tensor, samplings: list[RowSampling]) -> list[SampledToken]:
    processed = [i for i, c in enumerate(samplings) if c.logits_processor]
    if not all(c.is_argmax_only for c in samplings):
        logits = logits.to(torch.float32, copy=bool(processed))
    raw = _process_logits(logits, samplings, processed)
    return _choose_tokens(logits, raw, samplings, CANDIDATES)


def _choose_tokens(
    logits: Tensor, raw: dict[int, Tensor], samplings: list[RowSampling], candidates: int
) -> list[SampledToken]:
    """Choose a token for each row of processed `logits`; `raw`: rows as they were before.

    Results are read from the device all at once, at the end. Rows whose top-k or top-p reaches
    beyond the highest `candidates` are chosen again with 16 times as many.
    """
    highest, tokens = _argmax(logits)
    is_enough = torch.ones_like(tokens, dtype=torch.bool)
    random_rows = [i for i, c in enumerate(samplings) if c.sampling.temperature > 0]
    if random_rows:
        index = _row_index(random_rows, logits)
        tokens[index], is_enough[index] = _draw(
            logits[index], [samplings[i] for i in random_rows], candidates
        )
    logprob_rows = [i for i, c in enumerate(samplings) if c.sampling.logprobs is not None]
    logprobs = (
        _gather_logprobs(logits, raw, samplings, tokens, logprob_rows) if logprob_rows else ()
    )
    token_ids, finite, row_is_enough, *gathered = to_host(
        tokens, highest.isfinite(), is_enough, *logprobs
    )
    sampled = [SampledToken(int(t) if s else None) for t, s in zip(token_ids, finite, strict=True)]
    for place, i in enumerate(logprob_rows):
        if sampled[i].token is not None:
            sampled[i] = _with_logprobs(sampled[i], samplings[i], place, *gathered)
    if unfinished := [
        i for i, s in enumerate(sampled) if s.token is not None and not row_is_enough[i]
    ]:
        own = {place: raw[i] for place, i in enumerate(unfinished) if i in raw}
        unfinished_samplings = [samplings[i] for i in unfinished]
        redrawn = _choose_tokens(
            logits[_row_index(unfinished, logits)], own, unfinished_samplings, 16 * candidates
        )
        for i, found in zip(unfinished, redrawn, strict=True):
            sampled[i] = found
    return sampled


def _row_index(rows: list[int], like: Tensor) -> Tensor:
    return to_device(rows, torch.long, like.device)


def _column(values: list[float], like: Tensor) -> Tensor:
    return to_device(values, like.dtype, like.device)[:, None]


def _process_logits(
    logits: Tensor, samplings: list[RowSampling], rows: list[int]
) -> dict[int, Tensor]:
    """Apply the logits processors of `rows` in place.

    Returns copies of the unprocessed rows, by index, where log probabilities are wanted.
    """
    raw = {i: logits[i].clone() for i in rows if samplings[i].sampling.logprobs is not None}
    for i in rows:
        if processor := samplings[i].logits_processor:
            processor(logits[i])
    return raw


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest logit of each row and its first index; NaN where a row holds one.

    The stride that holds it is found first: on a CPU a maximum takes half the time of an argmax.
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


def _draw(logits: Tensor, samplings: list[RowSampling], candidates: int) -> tuple[Tensor, Tensor]:
    """Draw a token for each row.

    Returns tokens `[rows]`, and whether `candidates` were enough for each row's cuts. Overwrites
    `logits`.
    """
    logits /= _column([c.sampling.temperature for c in samplings], logits)
    _apply_min_p(logits, samplings)
    bound, is_enough = _top_k_top_p_bounds(logits, samplings, candidates)
    weights = logits.softmax(-1)
    if bound is not None:
        weights.masked_fill_(logits < bound, 0)
    return _invert_cdf(weights, _column([c.uniform for c in samplings], logits)), is_enough


def _apply_min_p(logits: Tensor, samplings: list[RowSampling]) -> None:
    """Apply min-p in place: drop tokens less likely than that share of the likeliest one."""
    rows = [i for i, c in enumerate(samplings) if c.sampling.min_p > 0]
    if rows:
        log_share = _column([log(samplings[i].sampling.min_p) for i in rows], logits)
        index = _row_index(rows, logits)
        selected = logits[index]
        logits[index] = selected.masked_fill(
            selected < selected.amax(-1, keepdim=True) + log_share, -torch.inf
        )


def _top_k_top_p_bounds(
    logits: Tensor, samplings: list[RowSampling], candidates: int
) -> tuple[Tensor | None, Tensor]:
    """Return the lowest logit that top-k and top-p keep, `[rows, 1]`; None if no row is cut.

    The second value says for each row whether that logit was among the `candidates`, `[rows]`.
    """
    is_enough = torch.ones_like(logits[:, 0], dtype=torch.bool)
    cut = [i for i, c in enumerate(samplings) if c.sampling.top_k > 0 or c.sampling.top_p < 1]
    if not cut:
        return None, is_enough
    bounds, index = torch.full_like(logits[:, :1], -torch.inf), _row_index(cut, logits)
    bounds[index], is_enough[index] = _bounds_of_cut_rows(
        logits[index], [samplings[i] for i in cut], candidates
    )
    return bounds, is_enough


def _bounds_of_cut_rows(
    logits: Tensor, samplings: list[RowSampling], candidates: int
) -> tuple[Tensor, Tensor]:
    """Do as `_top_k_top_p_bounds` does, for rows that all have a top-k or top-p."""
    vocabulary = logits.shape[-1]
    count = min(candidates, vocabulary)
    top_k = [c.sampling.top_k if c.sampling.top_k > 0 else vocabulary for c in samplings]
    ranks_kept = _row_index(top_k, logits)[:, None]
    top_p = _column([c.sampling.top_p for c in samplings], logits)
    highest_logits = logits.topk(count, -1).values
    ranks = torch.arange(count, device=logits.device)
    first = highest_logits.masked_fill(ranks >= ranks_kept, -torch.inf).logsumexp(-1, keepdim=True)
    uncut = ranks_kept >= vocabulary
    weights = (highest_logits - torch.where(uncut, logits.logsumexp(-1, keepdim=True), first)).exp()
    is_enough = (ranks_kept <= count) | uncut & (weights.sum(-1, keepdim=True) >= top_p)
    keep = (weights.cumsum(-1) - weights < top_p) & (ranks < ranks_kept)
    bounds = highest_logits.gather(-1, keep.sum(-1, keepdim=True).clamp(min=1) - 1)
    return bounds, is_enough[:, 0] | (count == vocabulary)


def _invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return for each row the first token whose cumulative weight exceeds `uniforms` of the total.

    Weights are summed by strides, then within one: faster than one long sum, and more exact.
    """
    rows, vocabulary = weights.shape
    if padding := -vocabulary % STRIDE:
        weights = pad(weights, (0, padding))
    weights = weights.view(rows, -1, STRIDE)
    sums = weights.sum(-1)
    cumulative = sums.cumsum(-1)
    target = uniforms * cumulative[:, -1:]
    stride = _first_above(cumulative, target)
    before = (cumulative - sums).gather(-1, stride)
    within = weights[torch.arange(rows, device=weights.device), stride[:, 0]].cumsum(-1)
    tokens = stride * STRIDE + _first_above(within, target - before)
    return tokens[:, 0].clamp(max=vocabulary - 1)  # only NaN leads beyond it


def _first_above(rising: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first value above `target`, never of a token without weight.

    Rounding could otherwise lead to one.
    """
    below_last = rising[:, -1:].nextafter(rising.new_zeros(()))
    found = torch.searchsorted(rising, target.clamp(min=0).minimum(below_last), right=True)
    return found.clamp(max=rising.shape[-1] - 1)


def _gather_logprobs(
    logits: Tensor,
    raw: dict[int, Tensor],
    samplings: list[RowSampling],
    tokens: Tensor,
    rows: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probabilities under the model's own distribution, before any processing.

    They are those of each row's token, then the likeliest tokens and their log probabilities, as
    many as the row that wants most.
    """
    own = torch.stack([raw.get(i, logits[i]) for i in rows])
    own = own - own.logsumexp(-1, keepdim=True)
    top = max(samplings[i].sampling.logprobs or 0 for i in rows)
    values, ids = own.topk(min(top, own.shape[-1]))
    return own.gather(-1, tokens[_row_index(rows, logits)][:, None]), ids, values


def _with_logprobs(
    sampled: SampledToken, row_sampling: RowSampling, place: int,
    own: list[float], ids: list[float], values: list[float],
) -> SampledToken:  # fmt: skip
    """Return `sampled` with what `_gather_logprobs` found for row `place` of those it was given."""
    width = len(ids) // len(own)
    row = slice(place * width, place * width + min(width, row_sampling.sampling.logprobs or 0))
    top = [(int(token), value) for token, value in zip(ids[row], values[row], strict=True)]
    return replace(sampled, logprob=own[place], top_logprobs=top)
