"""Recognises quantised checkpoints: which method, whether it can be run, and by which scales.

Weights of 8 bits with scales beside them (`weight_scale`, `weight_scale_inv`) are run: a worker
multiplies them out when it loads them. Every other method is refused by its name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.artifact_verification import ArtifactRefused, read_json
from registry.checkpoints.safetensors_header import TensorHeader, Tensors, TensorShape

SCALE_SUFFIXES = ("_scale_inv", "_scale")
BLOCK = (128, 128)  # of DeepSeek's fp8, where `weight_block_size` is not given
QUANTIZED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
_SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F64", "F8_E8M0"})
# Methods whose weights are 8 bits times a scale, and nothing else.
SCALED_METHODS = frozenset({"fp8", "fbgemm_fp8", "int8"})
_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
}
# Files beside config.json in which makers declare a method.
_DECLARING_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
# Names and dtypes by which a method shows in the headers, the most particular first.
_SIGNS = (
    ("GPTQ", re.compile(r"\.g_idx$")),
    ("AWQ or GPTQ", re.compile(r"\.(qweight|qzeros)$")),
    ("bitsandbytes", re.compile(r"\.(SCB|weight\.(absmax|quant_map|quant_state\..+))$")),
    ("compressed-tensors", re.compile(r"\.(weight_packed|weight_g_idx|weight_zero_point)$")),
    ("modelopt NVFP4", re.compile(r"\.weight_scale_2$")),
    ("MXFP4", re.compile(r"_blocks$")),
    ("EETQ", re.compile(r"\.weight_scales$")),
    ("torchao", re.compile(r":(qdata|scale)$|_weight_qdata$")),
    ("quanto", re.compile(r"\.weight\._(data|scale)$")),
    ("HQQ", re.compile(r"\.W_q$")),
    ("AQLM", re.compile(r"\.codebooks$")),
)  # fmt: skip
_STORED_INTEGERS = frozenset({"U8", "I16", "U16", "I32", "U32", "F4", "F6_E2M3", "F6_E3M2"})
# What calibration leaves for activations and for the KV cache; the weights do not depend on it.
_UNUSED_SCALES = re.compile(
    r"\.(input_scale|input_scale_ub|activation_scale|[kvq]_scale|kv_scale)$"
)


@dataclass(frozen=True)
class ScaledWeight:
    """A tensor of 8 bits that stands for itself times its scale.

    `scale` names the tensor with one number per block. A block's size is in rows and columns of the
    weight's last two dimensions; the last block of a row or column may be cut. Without `block` one
    number is for the whole tensor.
    """

    scale: str
    block: tuple[int, int] | None


def scaled_weights(
    directory: Path, config: Mapping[str, Any], tensors: Tensors
) -> dict[str, ScaledWeight]:
    """Return how the tensors of 8 bits are to be multiplied out, by name; empty without such.

    Raises `ArtifactRefused`, with the method's name and what to do instead, for a quantised
    checkpoint of any other kind, and for scales that are missing or do not fit.
    """
    file, method, settings = _declaration(directory, config)
    visible = _visible_method(tensors)
    is_quantized = bool(visible) or any(t.dtype in QUANTIZED_DTYPES for t in tensors.values())
    if method and method not in SCALED_METHODS and (file == "config.json" or is_quantized):
        raise _refusal(file, _NAMES.get(method, method))
    if visible:
        raise _refusal("*.safetensors", visible)
    return dict(_find_scales(tensors, settings.get("weight_block_size"), bool(method)))


def unused_tensors(scaled: Mapping[str, ScaledWeight], tensors: Tensors) -> set[str]:
    """Return the names of tensors that no model of transformers has: scales of any kind."""
    return {weight.scale for weight in scaled.values()} | {
        name for name in tensors if _UNUSED_SCALES.search(name)
    }


def _declaration(
    directory: Path, config: Mapping[str, Any]
) -> tuple[str, str | None, Mapping[str, Any]]:
    """Return the file, the method's name in lower case and the settings of a declaration."""
    for part in (config, config.get("text_config") or {}):
        settings = part.get("quantization_config") or part.get("compression_config")
        if settings:
            return "config.json", _method(settings), settings
    for file, method in _DECLARING_FILES.items():
        if (directory / file).exists():
            content = read_json(directory / file)
            is_declared = isinstance(content, dict) and content
            return file, method if is_declared else None, {}
    return "config.json", None, {}


def _method(settings: object) -> str:
    if not isinstance(settings, dict):
        raise ArtifactRefused("config.json", f"quantization_config is {settings!r}, no object")
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    method = str(settings.get("quant_method") or "").lower()
    algorithm = str(settings.get("quant_algo") or "")
    if not method and (algorithm or "modelopt" in str(settings.get("producer"))):
        return "modelopt"
    return method or "a method without a name (quant_method)"


def _visible_method(tensors: Tensors) -> str | None:
    """Return the method that tensors' names or dtypes show, other than 8 bits with scales."""
    for method, sign in _SIGNS:
        if any(sign.search(name) for name in tensors):
            return method
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype in _STORED_INTEGERS:
            return f"an unknown method ({name} has dtype {tensor.dtype})"
    return None


def _refusal(file: str, method: str) -> ArtifactRefused:
    return ArtifactRefused(
        file,
        f"the weights are quantised by {method}, which this engine cannot run: serve them with "
        "vLLM and register that server (--remote), or take an unquantised checkpoint",
    )


def _find_scales(
    tensors: Tensors, block_size: object, is_declared: bool
) -> Iterator[tuple[str, ScaledWeight]]:
    for name, tensor in tensors.items():
        if tensor.dtype not in QUANTIZED_DTYPES or name.endswith(SCALE_SUFFIXES):
            continue
        scale = next((name + s for s in SCALE_SUFFIXES if name + s in tensors), None)
        if scale:
            yield name, _fit(name, tensor, scale, tensors[scale], _block(block_size))
        elif is_declared or tensor.dtype == "I8":
            reason = f"{name} has dtype {tensor.dtype} and no {name}_scale or {name}_scale_inv"
            raise ArtifactRefused(tensor.path.name, reason + "; fetch the whole checkpoint")


def _block(declared: object) -> tuple[int, int]:
    if declared is None:
        return BLOCK
    if isinstance(declared, list) and [type(size) for size in declared] == [int, int]:
        rows, columns = declared
        if rows > 0 and columns > 0:
            return rows, columns
    raise ArtifactRefused("config.json", f"weight_block_size is {declared!r}, not two sizes")


def _fit(
    name: str, weight: TensorHeader, scale: str, scales: TensorHeader, block: tuple[int, int]
) -> ScaledWeight:
    """Return how a weight's scales are spread: one, one a row, or one a block.

    Raises `ArtifactRefused` for scales of another shape or dtype.
    """
    if scales.dtype not in _SCALE_DTYPES:
        reason = f"{scale} has dtype {scales.dtype}; {', '.join(sorted(_SCALE_DTYPES))} are known"
        raise ArtifactRefused(scales.path.name, reason)
    if scales.numel == 1:
        return ScaledWeight(scale, None)
    for size in _possible_blocks(weight.shape, block):
        if _grid(weight.shape, size) == _as_grid(weight.shape, scales.shape):
            return ScaledWeight(scale, size)
    reason = f"{scale} has the shape {list(scales.shape)}, which fits {name} of "
    reason += f"{list(weight.shape)} neither by rows nor by blocks of {block[0]} x {block[1]}"
    raise ArtifactRefused(scales.path.name, reason)


def _possible_blocks(shape: TensorShape, block: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the blocks that scales may have: a row, the declared one, the whole matrix."""
    return [(1, shape[-1]), block, (shape[-2], shape[-1])] if len(shape) > 1 else []


def _grid(shape: TensorShape, block: tuple[int, int]) -> TensorShape:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _as_grid(weight: TensorShape, scales: TensorShape) -> TensorShape:
    """Return the scales' shape with as many dimensions as the weight has."""
    return scales + (1,) * (len(weight) - len(scales))
