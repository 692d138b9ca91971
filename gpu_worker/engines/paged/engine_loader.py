"""Loads a `TransformersEngine` from a directory: weights, KV sized to the memory, warm-up."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import structlog
import torch

from gpu_worker.engines.engine import DoesNotFit
from gpu_worker.engines.paged import model_loader as models
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS
from gpu_worker.engines.paged.engine import ADAPTER_BYTES, TransformersEngine
from gpu_worker.engines.paged.tensor_parallel import TensorParallelGroup
from gpu_worker.engines.paged.weights.lora_manager import CheckDirectory, allow_all

log = structlog.get_logger()


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
    is_proven: Callable[[str], bool] = lambda setting: False,
    keep_proof: Callable[[str], None] = lambda setting: None,
    check_directory: CheckDirectory = allow_all,
) -> TransformersEngine:
    """Load a model from a Hugging Face directory, and return its engine, warm and ready to serve.

    Blocks until then; `stage` is called with "load" and "warm_up" as each of them begins. Without
    `kv_tokens` the KV cache gets what weights, the largest step and adapters leave of
    `memory_bytes`, or of the free memory if that is None. `adapter_bytes` bounds the memory of LoRA
    adapters; 0 stands for a tenth of what weights and the largest step leave, at most 1 GiB, or for
    1 GiB if `kv_tokens` is given. `threads` is the number of CPU threads, None torch's own choice;
    `device` None is the GPU if there is one, else the CPU. With a `tensor_parallel_size` above 1
    this process is the first rank and starts the others; the ranks divide memory and threads among
    themselves. The model is compared with transformers, and `keep_proof` called with the setting
    of the proof, unless `is_proven` returns True for that setting; ranks are not compared.
    `check_directory` raises for a directory from which no adapter may be loaded. Raises
    `UnsupportedModel`, with the architecture's name, for a model that this engine cannot run or
    computes otherwise, `IncompleteCheckpoint` for one whose weights are not whole, `DoesNotFit`
    when too little memory is left for KV or for a step, and `DeviceLost` when a rank ends.
    """
    if threads:
        torch.set_num_threads(threads)
    stage("load")
    if tensor_parallel_size > 1:  # before processes start; `load_model` checks it in each of them
        models.check_supported(directory, device, tensor_parallel_size)
    with ExitStack() as stack:
        group = TensorParallelGroup.start(
            directory, models.resolve_device(device), tensor_parallel_size
        )
        stack.callback(group.close)
        loaded = models.load_model(directory, device, tensor_parallel_size, is_proven)
        if tensor_parallel_size > 1:
            log.info("proof_skipped", reason="the model is divided among tensor parallel ranks")
        stage("warm_up")
        engine = fit_engine(
            loaded, max_sequences, max_batch_tokens, kv_tokens, memory_bytes,
            prefix_cache=prefix_cache, adapter_bytes=adapter_bytes, group=group,
            check_directory=check_directory,
        )  # fmt: skip
        stack.pop_all()
    if loaded.reference:
        keep_proof(loaded.reference.setting)
    return engine


def fit_engine(
    loaded: models.LoadedCausalLM,
    max_sequences: int,
    max_batch_tokens: int,
    kv_tokens: int | None = None,
    memory_bytes: int | None = None,
    prefix_cache: bool = True,
    adapter_bytes: int = 0,
    group: TensorParallelGroup | None = None,
    check_directory: CheckDirectory = allow_all,
) -> TransformersEngine:
    """Size the KV cache for a loaded model, build its engine, warm it up and return it.

    The parameters are those of `load`; `group` None is this process alone. Raises `DoesNotFit` when
    a full step does not fit the memory, or when the KV would hold fewer tokens than a full step or
    the model's context, whichever is less.
    """
    group = group or TensorParallelGroup()
    if not kv_tokens:
        step_bytes = _measure_step_bytes(loaded, max_sequences, max_batch_tokens, group)
        # Asked after the measurement: the libraries that it loads take memory, too.
        spare_bytes = group.min_spare_bytes(loaded.model, memory_bytes) - step_bytes
        adapter_bytes = adapter_bytes or default_adapter_bytes(spare_bytes)
        if group.world_size > 1:  # tensor parallel ranks run without adapters
            adapter_bytes = 0
        spare_bytes -= adapter_bytes
        kv_tokens = models.max_kv_tokens(loaded, max_sequences, max_batch_tokens, spare_bytes)
        min_tokens = min(max_batch_tokens, loaded.context_length)
        _check_kv_fits(kv_tokens, min_tokens, memory_bytes, adapter_bytes)
    max_adapter_bytes = adapter_bytes or ADAPTER_BYTES
    engine = TransformersEngine(
        loaded,
        max_sequences,
        max_batch_tokens,
        kv_tokens,
        prefix_cache,
        max_adapter_bytes,
        group,
        check_directory,
    )
    engine.warm_up()
    return engine


def default_adapter_bytes(spare_bytes: int) -> int:
    """Return the bytes for LoRA adapters where nobody says, of what weights and a step leave."""
    return min(ADAPTER_BYTES, max(0, spare_bytes // 10))


def _check_kv_fits(
    tokens: int, min_tokens: int, memory_bytes: int | None, adapter_bytes: int
) -> None:
    """Raise `DoesNotFit` if the KV would hold only `tokens` tokens, fewer than `min_tokens`."""
    if tokens < min_tokens:
        memory = "the free memory" if memory_bytes is None else f"{memory_bytes:,} bytes"
        raise DoesNotFit(
            f"weights, one step and {adapter_bytes:,} bytes for adapters leave room for "
            f"{max(0, tokens)} tokens of KV in {memory}, and at least {min_tokens} are needed; "
            "raise --memory or lower --max-batch-tokens or --adapter-bytes"
        )


def _measure_step_bytes(
    loaded: models.LoadedCausalLM,
    max_sequences: int,
    max_batch_tokens: int,
    group: TensorParallelGroup,
) -> int:
    """Measure the bytes that steps take beside weights and KV, in an engine with little KV."""
    kv_tokens = 2 * max_batch_tokens + max_sequences * BLOCK_TOKENS
    engine = TransformersEngine(
        loaded, max_sequences, max_batch_tokens, kv_tokens, prefix_cache=False, group=group
    )
    try:
        return engine.measure_step_bytes()
    finally:
        engine.close_keeping_ranks()
