"""A `TransformersEngine` from a directory: weights, KV for the memory that is left, a warm-up."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from gpu_worker.engines.paged import model as models
from gpu_worker.engines.paged.blocks import BLOCK_TOKENS
from gpu_worker.engines.paged.engine import ADAPTER_BYTES, TransformersEngine
from gpu_worker.engines.paged.fitting import check_kv
from gpu_worker.engines.paged.parallel import Group


def load(
    directory: Path,
    *,
    max_sequences: int = 64,
    max_batch_tokens: int = 512,
    kv_tokens: int | None = None,
    memory_bytes: int | None = None,
    threads: int | None = None,
    prefix_cache: bool = True,
    adapter_bytes: int = 0,
    device: str | None = None,
    tensor_parallel_size: int = 1,
    stage: Callable[[str], None] = lambda name: None,
) -> TransformersEngine:
    """Load a Hugging Face directory and warm up; `stage` hears what is being done.

    Without `kv_tokens` the KV gets what weights, the largest step and adapters leave of
    `memory_bytes`, or of the memory that is free. `adapter_bytes` 0: a tenth of what is left
    there, at most 1 GiB; with `kv_tokens` 1 GiB. Of several tensor parallel ranks this process is
    the first and starts the others; they divide memory and `threads`. Raises `Unsupported`, with
    the architecture's name, for what this engine cannot run, and `DoesNotFit`.
    """
    if threads:
        torch.set_num_threads(threads)
    stage("load")
    models.check(directory, device, tensor_parallel_size)
    with ExitStack() as stack:
        group = Group.start(directory, models.place_for(device), tensor_parallel_size)
        stack.callback(group.close)
        loaded = models.load(directory, device, tensor_parallel_size)
        stage("warm_up")
        engine = fitted(
            loaded, max_sequences, max_batch_tokens, kv_tokens, memory_bytes,
            prefix_cache=prefix_cache, adapter_bytes=adapter_bytes, group=group,
        )  # fmt: skip
        stack.pop_all()
    return engine


def fitted(
    loaded: models.Loaded,
    max_sequences: int,
    max_batch_tokens: int,
    kv_tokens: int | None = None,
    memory_bytes: int | None = None,
    prefix_cache: bool = True,
    adapter_bytes: int = 0,
    group: Group | None = None,
) -> TransformersEngine:
    """As `load`, of a model that is loaded."""
    group = group or Group()
    if not kv_tokens:
        step = _step_bytes(loaded, max_sequences, max_batch_tokens, group)
        spare = group.least_spare(loaded.model, memory_bytes) - step  # libraries are loaded by now
        adapter_bytes = adapter_bytes or min(ADAPTER_BYTES, max(0, spare // 10))
        if group.size > 1:  # ranks have no adapters
            adapter_bytes = 0
        spare -= adapter_bytes
        kv_tokens = models.kv_tokens_for(loaded, max_sequences, max_batch_tokens, spare)
        least = min(max_batch_tokens, loaded.context)
        check_kv(kv_tokens, least, memory_bytes, adapter_bytes)
    bound = adapter_bytes or ADAPTER_BYTES
    engine = TransformersEngine(
        loaded, max_sequences, max_batch_tokens, kv_tokens, prefix_cache, bound, group
    )
    engine.warm_up()
    return engine


def _step_bytes(
    loaded: models.Loaded, max_sequences: int, max_batch_tokens: int, group: Group
) -> int:
    """What steps take beside weights and KV, measured in an engine of little KV."""
    room = 2 * max_batch_tokens + max_sequences * BLOCK_TOKENS
    engine = TransformersEngine(
        loaded, max_sequences, max_batch_tokens, room, prefix_cache=False, group=group
    )
    try:
        return engine.step_bytes()
    finally:
        engine.release()
