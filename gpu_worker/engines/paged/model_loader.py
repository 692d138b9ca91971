"""Loads a causal language model, refuses what paged attention cannot run, and sizes the KV."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.distributed.configuration_utils import DistributedConfig

from gpu_worker.engines.checkpoints.loading import (
    UnsupportedModel,
    load_checkpoint,
    name_architecture,
    read_config,
    refuse_model,
)
from gpu_worker.engines.device_memory import default_device
from gpu_worker.engines.paged.attention import contiguous_kv_copies
from gpu_worker.engines.paged.attention.paged_attention import KvLayerSpec
from gpu_worker.engines.paged.attention_probe import probe_kv_layers
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS
from gpu_worker.engines.paged.batch.kv_cache_manager import pool_sizes
from gpu_worker.engines.paged.proof import Reference, compute_reference, describe_setting
from gpu_worker.engines.paged.weights.linear_layers import merge_and_pack, watch_reads
from gpu_worker.engines.paged.weights.parallel_linear import replace_parallel_linears
from registry.artifact_verification import json_reader
from registry.checkpoints.model_types import unsupported_features
from registry.generation_config import read_sampling_defaults
from registry.tokenizer.added_tokens import load_tokenizer, read_end_id
from streams.messages import NEUTRAL_SAMPLING, SamplingDefaults


@dataclass(frozen=True)
class LoadedCausalLM:
    """A causal language model on its device, with all that an engine has to know of it.

    `kv_layers` has one entry for each layer, in order. `context_length` is the most tokens that
    prompt and output may have together. `reference` is what an engine must compute before it
    serves; None if that is proven, or cannot be.
    """

    model: PreTrainedModel
    kv_layers: list[KvLayerSpec]
    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]  # end-of-sequence ids
    sampling_defaults: SamplingDefaults = NEUTRAL_SAMPLING
    reference: Reference | None = None


def resolve_device(device: str | None) -> torch.device:
    """Return the device of this name; without a name the GPU if torch sees one, else the CPU."""
    return torch.device(device) if device else default_device()


def check_supported(directory: Path, device: str | None, ranks: int) -> PreTrainedConfig:
    """Read a model directory's configuration, check that this engine can run it, and return it.

    Weights are not read. Raises `UnsupportedModel` if this engine cannot run the architecture, or
    not on `ranks` tensor parallel ranks. A configuration that cannot be read raises transformers'
    error.
    """
    target_device = resolve_device(device)
    config = read_config(directory, target_device)
    check_architecture(config)
    check_model_class(config)
    check_tensor_parallel(config, ranks, target_device)
    return config


def load_model(
    directory: Path,
    device: str | None = None,
    ranks: int = 1,
    is_proven: Callable[[str], bool] = lambda setting: False,
) -> LoadedCausalLM:
    """Load a model from a Hugging Face directory of safetensors to a device, and return it.

    `device` is resolved by `resolve_device`. Linear layers are merged and packed. With `ranks`
    above 1 every rank must call this at the same time, and each reads its part of the weights.
    Without, the model has a reference unless `is_proven` says that it needs none, in the setting
    that `describe_setting` returns. Raises `UnsupportedModel`, with the architecture's name, before
    weights are read or, where only a forward pass can tell, after.
    """
    config = check_supported(directory, device, ranks)
    target_device = resolve_device(device)
    distributed: dict[str, Any] = {}
    if ranks > 1:
        distributed["distributed_config"] = DistributedConfig(tp_size=ranks)
    model = load_checkpoint(AutoModelForCausalLM, directory, config, **distributed)
    model.to(target_device)  # type: ignore[arg-type]
    if ranks > 1:
        replace_parallel_linears(model)
    attention = model.config._attn_implementation
    tokenizer = load_tokenizer(directory, model.config.get_text_config().vocab_size)
    read, reference = json_reader(directory), None
    with watch_reads(model) as read_layers:
        loaded = inspect_model(model, tokenizer, read_end_id(tokenizer, read))
    if ranks == 1 and not is_proven(describe_setting(model)):
        model.set_attn_implementation(attention)
        reference = compute_reference(model, tokenizer, loaded.vocab_size, loaded.context_length)
    merge_and_pack(model, read_layers)
    defaults = read_sampling_defaults(read)
    return replace(loaded, reference=reference, sampling_defaults=defaults)


def inspect_model(
    model: PreTrainedModel, tokenizer: Tokenizer, end_id: int | None = None
) -> LoadedCausalLM:
    """Return a loaded model with its KV layers, vocabulary size, context length and end tokens.

    `end_id` is the tokeniser's end token, which ends an output like those of the configuration.
    Runs one token through the model. Puts the model into evaluation mode and switches dynamic RoPE
    off. The context length is 4096 where the configuration has none. Raises `UnsupportedModel` if
    this engine cannot run the model.
    """
    check_architecture(model.config)
    model.eval()  # type: ignore[no-untyped-call]
    _freeze_rope(model)
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or 4096
    layers = probe_kv_layers(model)
    return LoadedCausalLM(
        model, layers, tokenizer, config.vocab_size, context, _read_eos_ids(model, end_id)
    )


def check_architecture(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` if a configuration has a feature that paged attention cannot run.

    Such features are an encoder with a decoder; soft-capped, latent or bidirectional attention; KV
    shared between layers; layer types other than full and sliding attention; `longrope`; and
    state-space layers.
    """
    parts = (config, config.get_text_config())
    features = (unsupported_features(partial(_get_setting, part)) for part in parts)
    if feature := next(chain.from_iterable(features), None):
        raise refuse_model(name_architecture(config), f"it has {feature}")


def _get_setting(config: PreTrainedConfig, key: str) -> Any:
    """Return a setting's value, None without it; a text where it differs between layers."""
    try:
        return getattr(config, key, None)
    except RuntimeError:  # transformers' own for such a setting
        return "differs between layers"


def check_model_class(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` if transformers' class for a configuration cannot run here.

    It must be a causal language model, and take the positions of tokens from its caller: a class
    that counts them itself, from the length of its own cache, would count from zero in each step.
    """
    name = name_architecture(config)
    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        reason = f"transformers has no causal language model for its type {config.model_type!r}"
        raise refuse_model(name, reason) from None
    model_class = found[0] if isinstance(found, tuple) else found
    assert model_class is not None, "every configuration in the mapping has a class"
    takes_positions = "position_ids" in signature(model_class.forward).parameters
    is_wrapper = config.get_text_config() is not config  # hands them on to the model inside
    if not takes_positions and not is_wrapper:
        raise refuse_model(name, "its forward pass takes no positions, and counts tokens itself")


def _freeze_rope(model: PreTrainedModel) -> None:
    """Switch off dynamic RoPE, which changes frequencies for sequences longer than the context.

    transformers would check in each forward pass whether it must, and wait for the device
    (`dynamic`).
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if rope_type == "dynamic":
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(rope_type, dict):  # by type of layer
            for layer_type, own_type in rope_type.items():
                rope_type[layer_type] = "default" if own_type == "dynamic" else own_type


def check_tensor_parallel(config: PreTrainedConfig, ranks: int, device: torch.device) -> None:
    """Raise `UnsupportedModel`, with the numbers, if `ranks` ranks cannot share the model.

    They can if transformers has a tensor parallel plan for it, if `ranks` divides its numbers of
    attention heads and of KV heads, and if there is a GPU for each rank or the device is a CPU. One
    rank is always accepted.
    """
    if ranks == 1:
        return
    text = config.get_text_config()
    name = name_architecture(config)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    devices = torch.cuda.device_count() if device.type == "cuda" else ranks
    reasons = {
        "transformers has no tensor parallel plan for it": not text.base_model_tp_plan,
        f"its {heads} attention heads are no multiple of {ranks}": heads % ranks,
        f"its {kv_heads} KV heads are no multiple of {ranks}": kv_heads % ranks,
        f"there are {devices} devices": devices < ranks,
    }
    for reason, present in reasons.items():
        if present:
            raise UnsupportedModel(f"{name} cannot run on {ranks} tensor parallel ranks: {reason}")


def _read_eos_ids(model: PreTrainedModel, end_id: int | None) -> frozenset[int]:
    """Return the ids that generation_config.json, else config.json names, and the tokeniser's.

    vLLM stops at both: a model that was trained further often has its end of turn only in its
    tokeniser's settings.
    """
    own = frozenset() if end_id is None else frozenset([end_id])
    for settings in (model.generation_config, model.config.get_text_config()):
        end = getattr(settings, "eos_token_id", None)
        if end is not None:
            return own | frozenset([end] if isinstance(end, int) else end)
    return own


def max_kv_tokens(
    loaded: LoadedCausalLM, max_sequences: int, max_batch_tokens: int, spare_bytes: int
) -> int:
    """Return how many tokens of KV fit into `spare_bytes`; 0 if not even one does.

    The number is at most `max_sequences` times the context length, since no more can be used.
    """

    def bytes_for(tokens: int) -> int:
        return kv_bytes(loaded, tokens, max_sequences, max_batch_tokens)

    token_counts = range(1, max_sequences * loaded.context_length + 1)
    return bisect_right(token_counts, spare_bytes, key=bytes_for)


def kv_bytes(loaded: LoadedCausalLM, tokens: int, max_sequences: int, max_batch_tokens: int) -> int:
    """Return the bytes that the KV of `tokens` tokens takes on this rank, in all layers together.

    Layers with a sliding window hold no more than the windows of `max_sequences` sequences and the
    tokens of one step. On a CPU the contiguous copies of decoding sequences' KV are counted as
    well.
    """
    item_bytes = kv_item_bytes(loaded.model.dtype, loaded.model.device)
    return layer_kv_bytes(loaded.kv_layers, item_bytes, tokens, max_sequences, max_batch_tokens)


def kv_item_bytes(dtype: torch.dtype, device: torch.device) -> float:
    """Return the bytes of one number of the KV; on a CPU with its share of contiguous copies."""
    return dtype.itemsize * (1 + contiguous_kv_copies.MAX_SHARE * (device.type == "cpu"))


def layer_kv_bytes(
    layers: Sequence[KvLayerSpec],
    item_bytes: float,
    tokens: int,
    max_sequences: int,
    max_batch_tokens: int,
) -> int:
    """Return the bytes of the KV of `tokens` tokens in `layers`; see `kv_bytes`."""
    windows = {layer.window for layer in layers}
    blocks = pool_sizes(windows, tokens, max_sequences, max_batch_tokens)
    block_item_bytes = int(item_bytes * BLOCK_TOKENS)
    return sum(
        2 * kv.kv_heads * kv.head_dim * block_item_bytes * blocks[kv.window] for kv in layers
    )
