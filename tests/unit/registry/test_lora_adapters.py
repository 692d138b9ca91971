"""Adapters at registration: what is served is described, anything else is refused by name."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from registry.artifact_verification import ArtifactRefused
from registry.lora_inspection import adapter_from, lora_scale
from registry.models import Adapter, Model, Version, mock_model
from tests.support.safetensors_files import LORA_SHAPES, Q_PROJ, write_adapter, write_safetensors
from tests.support.versions import make_version

NOWHERE = make_version("1")


def base(version: Version = NOWHERE) -> Model:
    versions = {version.id: version}
    return mock_model("base").model_copy(update={"engine": "transformers", "versions": versions})


def added(directory: Path, version: Version = NOWHERE) -> Adapter:
    return adapter_from(directory, "mine", base(version), version)


def with_layers(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> Version:
    """A version whose files are here to be read."""
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", shapes)
    return make_version("1", directory=str(directory), files={"model.safetensors": "0"})


def test_an_adapter_is_what_its_files_say(tmp_path: Path) -> None:
    """Ranks and sizes come from the weights: the configuration may say anything."""
    other = {name.replace("q_proj", "v_proj"): shape for name, shape in LORA_SHAPES.items()}
    found = added(write_adapter(tmp_path, LORA_SHAPES | other, rank_pattern={"v_proj": 2}))
    assert (found.id, found.rank, found.targets) == ("base:mine", 2, ["q_proj", "v_proj"])
    assert found.parameters == 2 * (2 * 8 + 6 * 2)
    assert found.files.keys() == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"some_new_kind": {"x": 1}}, "some_new_kind"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"lora_alpha": "4"}, "is '4', not a number"),
        ({"lora_alpha": math.nan}, "is nan, not a number"),
        ({"alpha_pattern": {"(a|b)+": 2}}, "no plain name"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    """Served without it, the adapter would say something else, and nobody would know why."""
    with pytest.raises(ArtifactRefused, match=f"^adapter_config.json: .*{reason}"):
        added(write_adapter(tmp_path, **options))


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({}, "holds no tensors"),
        ({f"{Q_PROJ}.lora_A.weight": (2, 8)}, "has no lora_B"),
        (LORA_SHAPES | {f"{Q_PROJ}.lora_B.weight": (6, 3)}, "do not fit"),
        (
            LORA_SHAPES | {f"{Q_PROJ}.lora_magnitude_vector": (6, 1)},
            "lora_magnitude_vector is no LoRA weight",
        ),
        (
            LORA_SHAPES | {"base_model.model.lm_head.weight": (9, 8)},
            "lm_head.weight is no LoRA weight",
        ),
        (
            {"base_model.model.lm_head.lora_A.weight": (2, 8)}
            | {"base_model.model.lm_head.lora_B.weight": (9, 2)},
            "lm_head is in no layer",
        ),
    ],
)
def test_weights_that_are_no_pairs_of_a_layer_are_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], reason: str
) -> None:
    """They would fail in the engine, for a client, instead of here, for the operator."""
    with pytest.raises(ArtifactRefused, match=reason):
        added(write_adapter(tmp_path, shapes))


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ({"model.layers.0.self_attn.k_proj.weight": (6, 8)}, "q_proj is no module of the model"),
        ({"model.layers.1.self_attn.q_proj.weight": (6, 8)}, "q_proj is no module of the model"),
        ({"model.layers.0.self_attn.q_proj.weight": (4, 8)}, r"fits \(6, 8\), the model's is \(4"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    tmp_path: Path, layers: dict[str, tuple[int, ...]], reason: str
) -> None:
    """Where the model's files can be read they tell which modules there are."""
    version = with_layers(tmp_path / "base", layers)
    with pytest.raises(ArtifactRefused, match=reason):
        added(write_adapter(tmp_path / "adapter"), version)


def test_a_model_may_call_what_is_above_its_layers_as_it_likes(tmp_path: Path) -> None:
    """Checkpoints of multimodal models have other prefixes than the modules they become."""
    layers = {"language_model.model.layers.0.self_attn.q_proj.weight": (6, 8)}
    assert added(write_adapter(tmp_path / "a"), with_layers(tmp_path / "base", layers)).rank == 2


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 64, b"12345678{}"])
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A truncated download must be seen when it is registered."""
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ArtifactRefused, match="adapter_model.safetensors: is no safetensors file"):
        added(tmp_path)


def test_what_no_engine_reads_is_no_part_of_an_adapter(tmp_path: Path) -> None:
    """Trainers leave pickles beside them."""
    write_adapter(tmp_path)
    before = added(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"x")
    assert added(tmp_path).files == before.files


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    """A model's directory given by mistake."""
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ArtifactRefused, match="adapter_config.json: is missing"):
        added(tmp_path)


def test_an_engine_without_adapters_gets_none(tmp_path: Path) -> None:
    """It would answer as the model itself."""
    with pytest.raises(ArtifactRefused, match="the engine 'mock' serves none"):
        adapter_from(write_adapter(tmp_path), "mine", mock_model(), NOWHERE)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, 16 / 4),
        ({"use_rslora": True}, 16 / 2),
        ({"alpha_pattern": {"q_proj": 2}}, 2 / 4),
        ({"alpha_pattern": {"0.self_attn.q_proj": 2}}, 2 / 4),
        ({"alpha_pattern": {"proj": 2, "k_proj": 3}}, 16 / 4),
    ],
)
def test_the_scale_is_pefts(options: dict[str, Any], wanted: float) -> None:
    """alpha / rank, or alpha / sqrt(rank); patterns name ends of paths, by whole names."""
    module = "model.layers.0.self_attn.q_proj"
    assert lora_scale({"lora_alpha": 16, **options}, module, rank=4) == wanted


def test_an_adapter_without_a_layer_is_refused(tmp_path: Path) -> None:
    """It would change some layers and leave others, which no training does."""
    base_shapes = {f"model.layers.{n}.self_attn.q_proj.weight": (6, 8) for n in range(3)}
    version = with_layers(tmp_path / "base", base_shapes)
    (tmp_path / "base/config.json").write_text(json.dumps({"model_type": "llama"}))
    adapter = write_adapter(tmp_path / "a")
    with pytest.raises(ArtifactRefused, match=r"2 of the 3 modules .* layer 1\.self_attn\.q_proj"):
        added(adapter, version)
    for chosen in ({"layers_to_transform": [0]}, {"target_modules": r".*0\.self_attn\.q_proj"}):
        assert added(write_adapter(tmp_path / "a", **chosen), version).rank == 2
    (tmp_path / "base/config.json").write_text(json.dumps({"model_type": "llava"}))
    assert added(write_adapter(tmp_path / "a"), version).rank == 2


def test_an_adapter_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    """As a model's weights are."""
    file = write_adapter(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ArtifactRefused, match=r"adapter_model\.safetensors: is cut off"):
        added(tmp_path)


def mixture(directory: Path) -> Version:
    """A layer with attention and two experts, whose names are as in Qwen3's MoE."""
    names = [f"mlp.experts.{n}.{part}_proj" for n in range(2) for part in ("gate", "up", "down")]
    names += ["self_attn.q_proj", "mlp.gate"]
    version = with_layers(directory, {f"model.layers.0.{name}.weight": (6, 8) for name in names})
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return version


@pytest.mark.parametrize("targets", [["q_proj", "gate_proj", "up_proj", "down_proj"], ["q_proj"]])
def test_an_adapter_of_a_mixtures_attention_is_taken(tmp_path: Path, targets: list[str]) -> None:
    """Its configuration may name projections that only experts have."""
    adapter = write_adapter(tmp_path / "a", target_modules=targets)
    assert added(adapter, mixture(tmp_path / "base")).targets == ["q_proj"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("mlp.experts.0.gate_proj", r"experts\.0\.gate_proj is of an expert.*attention"),
        ("block_sparse_moe.experts.1.w1", "is of an expert"),
        ("mlp.experts", "is of an expert"),
        ("mlp.gate", "is no module of the model"),
    ],
)
def test_an_adapter_of_experts_is_refused(tmp_path: Path, module: str, reason: str) -> None:
    """The engine computes them together: every request would fail."""
    place = f"base_model.model.model.layers.0.{module}"
    shapes = {f"{place}.lora_A.weight": (2, 8), f"{place}.lora_B.weight": (6, 2)}
    with pytest.raises(ArtifactRefused, match=reason):
        added(write_adapter(tmp_path / "a", LORA_SHAPES | shapes), mixture(tmp_path / "base"))


def test_a_damaged_file_that_nobody_loads_is_no_fault_of_the_model(tmp_path: Path) -> None:
    """Such as Mistral's consolidated weights beside those of transformers."""
    shapes = {"model.layers.0.self_attn.q_proj.weight": (6, 8)}
    version = with_layers(tmp_path / "base", shapes)
    (tmp_path / "base/consolidated.safetensors").write_bytes(b"broken")
    assert added(write_adapter(tmp_path / "a"), version).rank == 2
