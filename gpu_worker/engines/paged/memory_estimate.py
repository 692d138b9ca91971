"""Estimates what a model will take in memory before it is loaded: weights, KV, tokens that fit."""

from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch

from gpu_worker.engines import device_memory
from gpu_worker.engines.checkpoints.loaded_size import loaded_bytes
from gpu_worker.engines.engine import MemoryEstimate
from gpu_worker.engines.paged.attention.paged_attention import KvLayerSpec
from gpu_worker.engines.paged.engine_loader import default_adapter_bytes
from gpu_worker.engines.paged.model_loader import kv_item_bytes, layer_kv_bytes
from gpu_worker.engines.precision import choose_dtype
from registry.artifact_verification import read_json
from registry.checkpoints.memory_use import KvLayer, kv_layers
from registry.model_inspection import read_context_length

SAMPLE_BYTES = 9  # of a step for each logit: float32 and its copy, and the dtype's
STEP_WIDTHS = 12  # activations of a step, in widths of its hidden states


def estimate_memory(
    directory: Path,
    engine: str,
    max_sequences: int,
    max_batch_tokens: int,
    memory_bytes: int | None,
) -> MemoryEstimate:
    """Return what a model's directory will take on the default device.

    `max_sequences`, `max_batch_tokens` and `memory_bytes` are the worker's settings; without
    `memory_bytes` the KV gets its share of the memory that is free now. A step's memory is measured
    only when a model is loaded, and estimated here.
    """
    device = device_memory.default_device()
    dtype = choose_dtype(directory, device)
    name = str(dtype).removeprefix("torch.")
    weights = loaded_bytes(directory, directory.rglob("*.safetensors"), engine, device)
    config = read_json(directory / "config.json")
    layers = kv_layers(config) if engine == "transformers" else []
    if not layers:
        return MemoryEstimate(device.type, name, weights)
    step = _step_bytes(config, dtype, max_sequences, max_batch_tokens)
    if memory_bytes is None:
        spare = device_memory.kv_budget_bytes(device, weights) - step
    else:
        spare = memory_bytes - weights - step
    specs = [KvLayerSpec(layer.kv_heads, layer.head_dim, layer.window) for layer in layers]
    item_bytes = kv_item_bytes(dtype, device)

    def bytes_for(tokens: int) -> int:
        return layer_kv_bytes(specs, item_bytes, tokens, max_sequences, max_batch_tokens)

    counts = range(1, max_sequences * read_context_length(directory) + 1)
    spare -= default_adapter_bytes(spare)
    return MemoryEstimate(
        device.type,
        name,
        weights,
        kv_bytes_per_token=_sequence_bytes(layers, dtype, 1),
        kv_bytes_per_1000_tokens=_sequence_bytes(layers, dtype, 1000),
        kv_tokens=bisect_right(counts, spare, key=bytes_for),
    )


def _step_bytes(
    config: dict[str, Any], dtype: torch.dtype, max_sequences: int, max_batch_tokens: int
) -> int:
    """Return roughly what the largest step takes: logits of all sequences, and activations."""
    text = config.get("text_config") or config
    logits = max_sequences * int(text.get("vocab_size") or 0) * SAMPLE_BYTES
    width = int(text.get("intermediate_size") or 4 * int(text.get("hidden_size") or 0))
    return logits + max_batch_tokens * width * STEP_WIDTHS * dtype.itemsize


def _sequence_bytes(layers: list[KvLayer], dtype: torch.dtype, tokens: int) -> int:
    return sum(
        layer.bytes_per_token(dtype.itemsize) * min(tokens, layer.window or tokens)
        for layer in layers
    )
