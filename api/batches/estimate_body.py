"""Body of an estimate: what a batch of an input may take, and how that was found."""

from typing import Any

from api.batch_bodies import batch_id
from api.batches.input_estimate import InputEstimate
from streams.records.jobs.batch_records import Batch, BatchStatus
from streams.usage_accounts import PICO


def estimate_object(
    estimate: InputEstimate,
    prompt_tokens: int,
    sampled: int,
    like: Batch | None,
    currency: str,
    free_bytes: int,
) -> dict[str, Any]:
    """Return what a batch of an input may take.

    `unusable_lines` are no requests of the endpoint, or name no model. `prompt_tokens` were
    estimated from `sampled` lines, and what is expected is as in the batch `like`; None without
    one. Costs are in units of the currency, at today's prices.
    """
    lines, most = estimate.lines, estimate.completion_tokens
    expected = seconds = None
    if like:
        expected = min(most, round(lines * like.usage.completion_tokens / like.completed))
        seconds = round(lines * _run_seconds(like) / like.total, 1)
    basis = f"prompts: {sampled} of {lines} lines tokenised, the others by their bytes"
    basis += f"; expected: as {batch_id(like)} was" if like else "; expected: no like batch yet"
    return {
        "object": "batch.estimate",
        "lines": lines,
        "unusable_lines": lines - sum(share.lines for share in estimate.models.values()),
        "models": {name: share.lines for name, share in estimate.models.items()},
        "prompt_tokens": prompt_tokens,
        "completion_tokens": {"expected": expected, "at_most": most},
        "cost": {
            "currency": currency,
            "expected": None if expected is None else _cost(estimate, prompt_tokens, expected),
            "at_most": _cost(estimate, prompt_tokens, most),
        },
        "seconds": seconds,
        "result_bytes": {"at_most": estimate.result_bytes, "free": free_bytes},
        "basis": basis,
    }


def _run_seconds(batch: Batch) -> int:
    begun = batch.times[BatchStatus.IN_PROGRESS.value]
    return max(1, batch.times[BatchStatus.FINALIZING.value] - begun)


def _cost(estimate: InputEstimate, prompt_tokens: int, completion_tokens: int) -> float:
    """The cost of tokens that are divided over the models as their lines' bytes and limits are."""
    size = sum(share.bytes for share in estimate.models.values())
    spend = 0.0
    for share in estimate.models.values():
        prompt = prompt_tokens * share.bytes / size
        most = estimate.completion_tokens
        completion = completion_tokens * share.completion_tokens / most if most else 0.0
        spend += share.price.spend_for(round(prompt), round(completion))
    return spend / PICO
