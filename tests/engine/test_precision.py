"""The dtype of a checkpoint: the loader takes it, and memory is planned with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.engines.device_memory import model_bytes
from gpu_worker.engines.paged.model_loader import load_model
from gpu_worker.engines.precision import choose_dtype, loaded_weight_bytes
from gpu_worker.engines.unary.embed import EmbedEngine
from tests.engine import tiny_encoders, tiny_models

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = torch.zeros(4, 8, dtype=torch.float16)


def checkpoint(directory: Path, config: Any, *tensors: torch.Tensor) -> list[Path]:
    """A directory with this config.json, and its one safetensors file."""
    (directory / "config.json").write_text(json.dumps(config))
    file = directory / "model.safetensors"
    save_file({str(number): each for number, each in enumerate(tensors)}, file)
    return [file]


@pytest.mark.parametrize(
    ("device", "has_bfloat16", "stored", "used"),
    [
        ("cpu", True, "bfloat16", torch.bfloat16),
        ("cpu", False, "bfloat16", torch.float32),
        ("cpu", True, "float16", torch.float32),
        ("cuda", False, "float16", torch.float16),
        ("cuda", False, "float32", torch.float32),
    ],
)
def test_a_checkpoint_keeps_its_type_where_the_device_computes_in_it(
    device: str,
    has_bfloat16: bool,
    stored: str,
    used: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """bfloat16 is twice as fast as float32 on a CPU that has it, and a sixth as fast elsewhere."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    checkpoint(tmp_path, {"dtype": stored}, HALF)
    assert choose_dtype(tmp_path, torch.device(device)) == used


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, torch.float32),
        ({"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"text_config": {"torch_dtype": "bfloat16"}}, torch.bfloat16),
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, torch.float32),
        ({}, torch.float16),
        ({"dtype": "nope"}, torch.float16),
        ({"dtype": "float8_e4m3fn"}, torch.float16),
        ({"dtype": "int8"}, torch.float16),
        ({"dtype": 7}, torch.float16),
        ({"dtype": {"": "bfloat16"}}, torch.float16),
        ({"text_config": 7}, torch.float16),
        ([], torch.float16),
    ],
)
def test_the_files_say_the_type_where_the_configuration_does_not(
    config: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Many a checkpoint names none, and takes twice the memory in another one than its own."""
    checkpoint(tmp_path, config, HALF)
    assert choose_dtype(tmp_path, CUDA) == dtype


def test_of_several_types_that_of_most_numbers_is_the_models(tmp_path: Path) -> None:
    """A few norms or routers in float32 do not make the whole model twice as large."""
    few, indices = torch.zeros(8), torch.zeros(100, dtype=torch.int64)
    files = checkpoint(tmp_path, {}, few, HALF, indices)
    assert choose_dtype(tmp_path, CUDA) == torch.float16
    numbers = few.numel() + HALF.numel()
    header = files[0].stat().st_size - 4 * few.numel() - 2 * HALF.numel() - 8 * indices.numel()
    assert loaded_weight_bytes(files, choose_dtype(tmp_path, CUDA)) == 2 * numbers + 800 + header
    assert loaded_weight_bytes(files, choose_dtype(tmp_path, CPU)) == 4 * numbers + 800 + header


@pytest.mark.parametrize("config", ["{", "[]", None])
def test_what_cannot_be_read_is_planned_with_its_size(config: str | None, tmp_path: Path) -> None:
    """One bad directory must not keep a worker from its other models; loading will tell."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    files = [tmp_path / "model.safetensors", tmp_path / "model.gguf"]
    for file in files:
        file.write_bytes(bytes(1000))
    assert choose_dtype(tmp_path, CUDA) == torch.float32
    assert loaded_weight_bytes(files, choose_dtype(tmp_path, CUDA)) == 2000


@pytest.mark.parametrize("kind", ["causal", "embed"])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("named", [True, False])
def test_the_plan_is_what_the_loader_takes(
    kind: str, stored: torch.dtype, named: bool, tmp_path: Path
) -> None:
    """Half of it planned, the first long prompt would find no memory."""
    if kind == "causal":
        tiny_models.save(LlamaForCausalLM(LlamaConfig(**tiny_models.GROUPED)), tmp_path)
    else:
        tiny_encoders.encoder(tmp_path, "bert", "mean")
    _store_as(tmp_path / "model.safetensors", stored)
    _name_dtype(tmp_path / "config.json", str(stored).removeprefix("torch.") if named else None)
    model: nn.Module
    if kind == "causal":
        model = load_model(tmp_path, "cpu").model
    else:
        model = EmbedEngine.load_head(tmp_path, CPU).model
    taken = model_bytes(model)
    planned = loaded_weight_bytes([tmp_path / "model.safetensors"], choose_dtype(tmp_path, CPU))
    assert 0.95 * taken < planned < 1.05 * taken + 16_384  # the file has a header, and no buffers


def _store_as(file: Path, dtype: torch.dtype) -> None:
    tensors = {
        name: each.to(dtype) if each.is_floating_point() else each
        for name, each in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def _name_dtype(file: Path, name: str | None) -> None:
    config = json.loads(file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = name
    file.write_text(json.dumps(config))
