"""Quantised checkpoints are refused by their method's name, but for 8 bits with scales."""

import math
from pathlib import Path
from typing import Any

import pytest

from registry.artifact_verification import read_json
from registry.checkpoints.model_weights import read_model_weights
from registry.checkpoints.quantization import ScaledWeight
from registry.model_inspection import check_model
from tests.support.checkpoints import Shapes, config_of, shapes_of, write_json, write_model

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 2,
    "head_dim": 96,
}
CONFIG = config_of("llama", **SIZES)
SHAPES = shapes_of(CONFIG)
LINEAR = [name for name in SHAPES if name.endswith("proj.weight")]


def refusal(directory: Path) -> str:
    return "\n".join(f"{f.path}: {f.reason}" for f in check_model(directory) if f.is_refusal)


def quantised(
    directory: Path,
    shape_of: Any,
    dtype: str = "F8_E4M3",
    suffix: str = "_scale",
    declared: Any = None,
) -> Path:
    """A Llama whose linear weights have 8 bits and, where `shape_of` returns one, a scale."""
    scales: Shapes = {name + suffix: shape_of(*SHAPES[name]) for name in LINEAR if shape_of}
    config = CONFIG | {"quantization_config": declared}
    dtypes = dict.fromkeys(LINEAR, dtype)
    return write_model(directory, config, SHAPES | scales, dtypes=dtypes)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
        ({"quant_algo": "FP8"}, "modelopt"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "tomorrow"}, "tomorrow"),
        ({"bits": 4}, "a method without a name"),
    ],
)
def test_a_declared_method_is_refused_by_its_name(
    tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    """With the way out: another engine, or another checkpoint."""
    found = refusal(write_model(tmp_path, CONFIG | {"quantization_config": settings}))
    assert found.startswith("config.json: the weights are quantised by " + name)
    assert "vLLM" in found
    assert "unquantised" in found


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "GPTQ"),
        ("quant_config.json", {"w_bit": 4}, "AWQ"),
    ],
)
def test_a_file_beside_config_json_declares_a_method(
    tmp_path: Path, file: str, content: dict[str, Any], name: str
) -> None:
    """It counts where the weights are quantised: some lie beside plain weights."""
    write_json(quantised(tmp_path, lambda rows, columns: ()) / file, content)
    assert refusal(tmp_path).startswith(f"{file}: the weights are quantised by {name}")
    write_model(tmp_path, CONFIG)
    assert refusal(tmp_path) == ""


@pytest.mark.parametrize(
    ("tensor", "dtype", "name"),
    [
        ("qweight", "I32", "AWQ or GPTQ"),
        ("g_idx", "I32", "GPTQ"),
        ("weight.absmax", "F32", "bitsandbytes"),
        ("SCB", "F32", "bitsandbytes"),
        ("weight_packed", "I32", "compressed-tensors"),
        ("weight_scale_2", "F32", "modelopt NVFP4"),
        ("weight:qdata", "I8", "torchao"),
        ("weight._data", "I8", "quanto"),
        ("weight", "U8", "an unknown method"),
        ("weight", "I32", "an unknown method"),
    ],
)
def test_a_method_that_only_the_header_shows_is_named(
    tmp_path: Path, tensor: str, dtype: str, name: str
) -> None:
    """config.json lost its declaration: transformers would load random weights."""
    extra = "model.layers.0.self_attn.q_proj." + tensor
    shapes = SHAPES | {extra: (4, 4)}
    found = refusal(write_model(tmp_path, CONFIG, shapes, dtypes={extra: dtype}))
    assert f"quantised by {name}" in found


def scaled(directory: Path) -> dict[str, ScaledWeight]:
    """The scaled weights of a directory, which must be accepted."""
    assert refusal(directory) == ""
    return dict(read_model_weights(directory, read_json(directory / "config.json")).scaled)


def blocks(rows: int, columns: int) -> tuple[int, ...]:
    return -(-rows // 128), -(-columns // 128)


@pytest.mark.parametrize(
    ("shape_of", "block"),
    [
        (lambda rows, columns: (), None),
        (lambda rows, columns: (1,), None),
        (lambda rows, columns: (rows,), (1, 256)),
        (lambda rows, columns: (rows, 1), (1, 256)),
        (blocks, (128, 128)),
    ],
)
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8"])
def test_eight_bits_with_scales_are_run(
    tmp_path: Path, shape_of: Any, block: tuple[int, int] | None, suffix: str, dtype: str
) -> None:
    """One scale, one a row, or one a block of 128 x 128, declared or not."""
    directory = quantised(tmp_path, shape_of, dtype, suffix)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert scaled(directory)[name] == ScaledWeight(name + suffix, block)
    assert scaled(directory).keys() == set(LINEAR)


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "FP8"},
    ],
)
def test_a_declared_fp8_is_run(tmp_path: Path, declared: dict[str, Any]) -> None:
    """DeepSeek's, transformers' own, AutoFP8's."""
    assert scaled(quantised(tmp_path, blocks, suffix="_scale_inv", declared=declared))


def test_blocks_of_a_declared_size_are_run(tmp_path: Path) -> None:
    """Any size that the scales' shapes fit."""
    declared: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    directory = quantised(tmp_path, lambda r, c: (-(-r // 64), -(-c // 32)), declared=declared)
    assert {weight.block for weight in scaled(directory).values()} == {(64, 32)}


@pytest.mark.parametrize(
    ("size", "message"), [(None, "128 x 128"), ([64, 64], "64 x 64"), ([64], "size is [64]")]
)
def test_scales_of_another_shape_are_refused(tmp_path: Path, size: Any, message: str) -> None:
    """With the shape, and the block that was expected."""
    declared = {"quant_method": "fp8", "weight_block_size": size}
    found = refusal(quantised(tmp_path, lambda rows, columns: (3, 5), declared=declared))
    assert message in found
    assert size == [64] or "_scale has the shape [3, 5]" in found


def test_scales_that_are_missing_are_refused(tmp_path: Path) -> None:
    """Without them the numbers mean nothing."""
    assert "has dtype I8 and no" in refusal(quantised(tmp_path, None, "I8"))
    assert "has dtype F8_E4M3 and no" in refusal(
        quantised(tmp_path, None, declared={"quant_method": "fp8"})
    )


def test_scales_do_not_hide_what_is_missing(tmp_path: Path) -> None:
    """The rest of the checkpoint is compared as any other."""
    directory = quantised(tmp_path, blocks, "F8_E4M3", "_scale_inv", {"quant_method": "fp8"})
    write_json(
        directory / "config.json", read_json(directory / "config.json") | {"num_hidden_layers": 4}
    )
    assert "layer 3 is in no file" in refusal(directory)


def test_what_is_loaded_counts_in_full(tmp_path: Path) -> None:
    """Multiplied out, 8 bits take the dtype in which the model computes; scales take nothing."""
    directory = quantised(tmp_path, blocks, suffix="_scale_inv")
    weights = read_model_weights(directory, CONFIG)
    numbers = sum(math.prod(shape) for shape in SHAPES.values())
    assert weights.loaded_bytes(2) == 2 * numbers
    assert weights.loaded_bytes(4) == 4 * numbers


@pytest.mark.parametrize("name", ["k_proj.k_scale", "v_proj.v_scale", "k_scale", "attn.kv_scale"])
def test_scales_of_the_kv_cache_are_left_out(tmp_path: Path, name: str) -> None:
    """Beside weights that are not quantised, too: a calibrated KV cache is another server's."""
    shapes = SHAPES | {f"model.layers.0.self_attn.{name}": ()}
    directory = write_model(tmp_path, CONFIG, shapes)
    assert refusal(directory) == ""
    numbers = sum(math.prod(shape) for shape in SHAPES.values())
    assert read_model_weights(directory, CONFIG).loaded_bytes(4) == 4 * numbers
