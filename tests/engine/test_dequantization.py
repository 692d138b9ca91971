"""Weights of 8 bits with scales compute what weights and scales multiplied in float32 compute."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from gpu_worker.engines.checkpoints.dequantization import multiply_out
from gpu_worker.engines.checkpoints.loaded_size import loaded_bytes
from gpu_worker.engines.checkpoints.loading import UnsupportedModel
from gpu_worker.engines.device_memory import model_bytes
from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import load_model
from gpu_worker.engines.unary.classify import ClassifyEngine
from gpu_worker.engines.unary.embed import EmbedEngine
from registry.model_inspection import check_model
from streams.messages import Sampling
from tests.engine import tiny_encoders, tiny_models
from tests.engine.tensor_parallel import load_engine, save_model

Block = tuple[int, int] | None
FP8 = torch.float8_e4m3fn
LIMITS = {FP8: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
WHOLE = 10**6  # rows or columns, more than any matrix here has
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 20]}
FORMS: dict[str, tuple[torch.dtype, str, tuple[int, int], Any]] = {
    "DeepSeek": (FP8, "_scale_inv", (32, 20), BLOCKS),
    "per tensor": (FP8, "_scale", (WHOLE, WHOLE), STATIC),
    "per row": (FP8, "_scale", (1, WHOLE), {"quant_method": "fbgemm_fp8"}),
    "e5m2, not declared": (torch.float8_e5m2, "_scale", (WHOLE, WHOLE), None),
    "int8, per tensor": (torch.int8, "_scale", (WHOLE, WHOLE), None),
    "int8, per row": (torch.int8, "_scale", (1, WHOLE), None),
    "int8, blocks of 128": (torch.int8, "_scale_inv", (128, 128), None),
}  # fmt: skip


def quantise(weight: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in blocks, one by one: each divided by its own scale."""
    parts, scales = [], []
    for rows in torch.split(weight, min(block[0], len(weight))):
        pieces = torch.split(rows, min(block[1], rows.shape[1]), 1)
        scales.append([piece.abs().max() / LIMITS[dtype] for piece in pieces])
        divided = [piece / scale for piece, scale in zip(pieces, scales[-1], strict=True)]
        parts.append(torch.cat(divided, 1))
    stored = torch.cat(parts)
    return (stored.round() if dtype == torch.int8 else stored).to(dtype), torch.tensor(scales)


def product(stored: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The matrix with its scales multiplied out, element by element."""
    rows, columns = torch.arange(stored.shape[0]), torch.arange(stored.shape[1])
    grid = scales.reshape(-(-len(rows) // block[0]), -1)
    return stored.float() * grid[rows // block[0]][:, columns // block[1]]


def is_linear(name: str) -> bool:
    return any(part in name for part in ("proj", "dense", "query", "lin", ".w1", ".w2", ".w3"))


def store(directory: Path, form: str) -> None:
    """Quantise a saved model's matrices, and beside it save what they stand for."""
    dtype, suffix, block, declared = FORMS[form]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        plain[name] = stored[name] = tensor
        if is_linear(name) and name.endswith(".weight"):
            stored[name], scale = quantise(tensor.float(), dtype, block)
            stored[name + suffix] = scale.reshape(()) if scale.numel() == 1 else scale
            plain[name] = product(stored[name], scale, block).to(tensor.dtype)
    shutil.copytree(directory, directory / "plain", ignore=lambda *_: ["plain"])
    save_file(plain, directory / "plain/model.safetensors", metadata={"format": "pt"})
    stored["model.layers.0.self_attn.k_proj.input_scale"] = torch.ones(1)  # of activations
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = declared
    (directory / "config.json").write_text(json.dumps(config))


def generate(directory: Path) -> list[int]:
    """Greedy tokens of an engine over a directory."""
    engine = TransformersEngine(load_model(directory, "cpu"), 4, 16, 512)
    try:
        return tokens_of(engine)
    finally:
        engine.close()


def tokens_of(engine: TransformersEngine) -> list[int]:
    sampling = Sampling(max_tokens=12, temperature=0)
    engine.add(Sequence("a", tiny_models.prompt(1, 20), sampling))
    found: list[int] = []
    while not engine.idle:
        for output in engine.step():
            assert not output.error
            found += output.tokens
    return found


def expect_generated(directory: Path) -> list[int]:
    """The tokens that plain transformers generates from the weights multiplied out."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=torch.float32)
    ids = torch.tensor([tiny_models.prompt(1, 20)])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
    return [int(token) for token in out[0, ids.shape[1] :]]


@pytest.mark.parametrize("block", [(128, 128), (32, 20), (1, 200), (7, 3), None])
@pytest.mark.parametrize("dtype", LIMITS)
def test_a_weight_is_multiplied_out_block_by_block(block: Block, dtype: torch.dtype) -> None:
    """The last block of a row or column may be cut."""
    weight = torch.randn(150, 200, generator=torch.Generator().manual_seed(1))
    stored, scales = quantise(weight, dtype, block or (WHOLE, WHOLE))
    found = multiply_out(stored, scales, block)
    assert torch.equal(found, product(stored, scales, block or (WHOLE, WHOLE)))
    assert (found - weight).abs().max() < 0.3
    experts = multiply_out(stored.reshape(3, 50, 200), torch.ones(3, 1, 1), (50, 200))
    assert torch.equal(experts, stored.reshape(3, 50, 200).float())


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_model_generates_what_its_weights_stand_for(form: str, tmp_path: Path) -> None:
    """In float32 token by token; nothing of it is random, nor rounded again."""
    save_model("llama", tmp_path)
    store(tmp_path, form)
    assert check_model(tmp_path) == []
    assert generate(tmp_path) == expect_generated(tmp_path)


def test_scales_of_the_kv_cache_change_nothing(tmp_path: Path) -> None:
    """Beside weights that are not quantised: what `models add` accepts, the worker loads."""
    save_model("llama", tmp_path)
    (tmp_path / "plain").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "plain" / name).write_bytes((tmp_path / name).read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{x}_proj.{x}_scale": torch.tensor(0.5) for x in "kv"}
    save_file(weights | scales, tmp_path / "model.safetensors", {"format": "pt"})
    assert check_model(tmp_path) == []
    assert generate(tmp_path) == expect_generated(tmp_path)


@pytest.mark.parametrize("architecture", ["gemma3", "phi3", "gpt_neox"])
def test_fused_and_tied_weights_are_multiplied_out(architecture: str, tmp_path: Path) -> None:
    """Whatever transformers makes of the names."""
    save_model(architecture, tmp_path)
    store(tmp_path, "DeepSeek")
    assert generate(tmp_path) == expect_generated(tmp_path)


def test_experts_are_multiplied_out_before_they_are_merged(tmp_path: Path) -> None:
    """They are stored one by one, each with its scales."""
    torch.manual_seed(7)
    shape = tiny_models.GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
    tiny_models.save(MixtralForCausalLM(MixtralConfig(**shape)), tmp_path)
    store(tmp_path, "DeepSeek")
    assert generate(tmp_path) == expect_generated(tmp_path)


def test_tensor_parallel_ranks_read_their_parts(tmp_path: Path) -> None:
    """Each multiplies out the whole, and keeps its own."""
    save_model("llama", tmp_path)
    store(tmp_path, "DeepSeek")
    engine = load_engine(tmp_path)
    try:
        assert tokens_of(engine) == expect_generated(tmp_path)
    finally:
        engine.close()


def vectors(engine: EmbedEngine | ClassifyEngine) -> Any:
    engine.add(Sequence("a", [], Sampling(), inputs=[[1, 7, 9, 2]]))
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    return np.frombuffer((outputs[-1].vectors or [])[0], "<f4")


@pytest.mark.parametrize("form", ["per row", "int8, per row"])
def test_encoders_are_multiplied_out_too(form: str, tmp_path: Path) -> None:
    """As sentence encoders, and as classifiers."""
    tiny_encoders.encoder(tmp_path / "embed", "bert", "mean")
    tiny_encoders.classifier(tmp_path / "classify", "bert")
    for name, kind in (("embed", EmbedEngine), ("classify", ClassifyEngine)):
        store(tmp_path / name, form)
        found, expected = (vectors(kind.load(tmp_path / name / part)) for part in ("", "plain"))
        np.testing.assert_array_equal(found, expected)


def test_what_a_quantised_model_takes_is_planned(tmp_path: Path) -> None:
    """Multiplied out it is four times its file."""
    save_model("llama", tmp_path)
    store(tmp_path, "int8, per row")
    loaded = load_model(tmp_path, "cpu")
    planned = loaded_bytes(tmp_path, [], "transformers", torch.device("cpu"))
    assert planned == pytest.approx(model_bytes(loaded.model), rel=0.01)


def test_a_method_that_cannot_be_run_is_refused_at_load_too(tmp_path: Path) -> None:
    """Files may have been registered by an older release."""
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*quantised by GPTQ"):
        load_model(tmp_path, "cpu")
