"""Sizes a unary engine's micro-batches to the memory that its model may take."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpu_worker.engines import device_memory
from gpu_worker.engines.engine import DoesNotFit
from gpu_worker.engines.unary.padding import PaddedBatch, TokenizedInput, pad_inputs


def fit_batch_tokens(
    head: Callable[[PaddedBatch], Tensor],
    weight_bytes: int,
    device: torch.device,
    context: int,
    max_batch_tokens: int,
    memory_bytes: int,
) -> int:
    """Return the most tokens of a micro-batch with which a model keeps to `memory_bytes`.

    These are `max_batch_tokens` or, as often as that does not fit, half of them, but never fewer
    than `context`, the longest input. The memory of a micro-batch of inputs of that length is
    measured by running it. `weight_bytes` is what the loaded weights take. Raises `DoesNotFit` if
    a single input of that length does not fit beside them.
    """
    spare, tokens, needed = memory_bytes - weight_bytes, max(max_batch_tokens, context), None
    while spare > 0:
        needed = _measure_bytes(partial(_run_batch, head, device, context, tokens), device)
        if needed is not None and needed <= spare:
            return tokens
        if tokens == context:
            break
        tokens = max(context, tokens // 2)
    step = "" if needed is None else f" and a batch of one input of {tokens} tokens {needed:,}"
    raise DoesNotFit(
        f"weights take {weight_bytes:,} bytes{step}, and the model may take {memory_bytes:,} "
        "bytes; raise --memory"
    )


def _measure_bytes(work: Callable[[], None], device: torch.device) -> int | None:
    """Return the bytes that `work` takes; None if they are more than the device has."""
    try:
        return device_memory.measure_peak_bytes(device, work)
    except Exception as error:  # torch has several for this
        if device_memory.is_out_of_memory(error):
            return None
        raise


@torch.inference_mode()
def _run_batch(
    head: Callable[[PaddedBatch], Tensor], device: torch.device, context: int, tokens: int
) -> None:
    head(pad_inputs([TokenizedInput([0] * context)] * (tokens // context), device))
