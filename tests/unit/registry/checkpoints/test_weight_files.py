"""Weight files that are missing, cut off, or not what the index says are refused by name."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from registry.artifact_verification import ArtifactRefused
from registry.model_inspection import check_model, model_from
from tests.support.checkpoints import (
    MODULES,
    Shapes,
    config_of,
    shapes_of,
    write_json,
    write_model,
)
from tests.support.safetensors_files import write_safetensors

CONFIG = config_of("llama")
SHAPES = shapes_of(CONFIG)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
HALVES = [dict(list(SHAPES.items())[:9]), dict(list(SHAPES.items())[9:])]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model in two files with an index."""
    (write_model(tmp_path, CONFIG) / "model.safetensors").unlink()
    for file, half in zip((FIRST, SECOND), HALVES, strict=True):
        write_safetensors(tmp_path / file, half)
    write_json(tmp_path / INDEX, {"metadata": {}, "weight_map": weight_map()})
    return tmp_path


def weight_map() -> dict[str, str]:
    return {n: file for file, half in zip((FIRST, SECOND), HALVES, strict=True) for n in half}


def refusal(directory: Path) -> str:
    """The one refusal of a directory; of none an empty text."""
    found = [f"{each.path}: {each.reason}" for each in check_model(directory) if each.is_refusal]
    return "\n".join(found)


def warning(directory: Path) -> str:
    return "\n".join(f"{f.path}: {f.reason}" for f in check_model(directory) if not f.is_refusal)


def test_shards_with_their_index_are_accepted(sharded: Path) -> None:
    """As save_pretrained writes them."""
    assert (refusal(sharded), warning(sharded)) == ("", "")


def test_a_shard_that_is_missing_is_refused(sharded: Path) -> None:
    """A download that broke off."""
    (sharded / SECOND).unlink()
    assert f"{INDEX}: names {SECOND}, which is missing; fetch it too" in refusal(sharded)


def test_a_file_that_is_not_loaded_may_be_damaged(tmp_path: Path) -> None:
    """Nobody reads weights in folders below, or those that the index leaves out."""
    directory = write_model(tmp_path, CONFIG)
    (directory / "onnx").mkdir()
    for name in ("onnx/model.safetensors", "consolidated.safetensors"):
        (directory / name).write_bytes(b"broken")
    assert refusal(directory) == ""


def test_what_no_engine_reads_is_a_warning(tmp_path: Path) -> None:
    """The user learns why a file is not in the record."""
    directory = write_model(tmp_path, CONFIG)
    for name in ("eval.csv", "pytorch_model.bin", "modeling_llama.py"):
        (directory / name).write_bytes(b"x")
    assert refusal(directory) == ""
    told = "eval.csv: is read by no engine, and is no part of the version, and 2 more files are not"
    assert told in warning(directory)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_known_type_is_not_needed(tmp_path: Path, file: str) -> None:
    """transformers has a class of its own for the type, and runs that."""
    directory = write_model(tmp_path, CONFIG)
    content = CONFIG if file == "config.json" else {}
    code = {"AutoModelForCausalLM": "modeling.M"}
    write_json(directory / file, content | {"auto_map": code})
    assert refusal(directory) == ""
    write_json(directory / "config.json", CONFIG | {"model_type": "own", "auto_map": code})
    assert "code that comes with a model is not run" in refusal(directory)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    """transformers reads none of them."""
    (sharded / INDEX).unlink()
    assert "without which the 2 shards are not read" in refusal(sharded)


def test_an_index_that_names_what_no_shard_has_is_refused(sharded: Path) -> None:
    """The index is of another save."""
    lying = {"weight_map": weight_map() | {"model.layers.0.extra.weight": FIRST}}
    write_json(sharded / INDEX, lying)
    assert f"names model.layers.0.extra.weight in {FIRST}" in refusal(sharded)
    write_json(sharded / INDEX, {"weight_map": {}})
    assert "has no weight_map" in refusal(sharded)


def test_an_index_that_names_the_wrong_shard_is_a_warning(sharded: Path) -> None:
    """transformers reads every tensor of each file that is named."""
    name = next(iter(HALVES[1]))
    moved = weight_map() | {name: FIRST}
    write_json(sharded / INDEX, {"weight_map": moved})
    assert refusal(sharded) == ""
    assert f"names {FIRST} for {name}, which is in {SECOND}" in warning(sharded)


def test_a_shard_that_the_index_leaves_out_is_not_read(sharded: Path) -> None:
    """A warning where the rest is whole; what is missing then is told besides."""
    only_first = {name: file for name, file in weight_map().items() if file == FIRST}
    write_json(sharded / INDEX, {"weight_map": only_first})
    assert f"{SECOND}: is not in {INDEX}" in warning(sharded)
    assert "no file" in refusal(sharded)


def test_a_tensor_in_two_shards_must_be_the_same(sharded: Path) -> None:
    """The order of the files would decide which one is loaded."""
    write_safetensors(sharded / SECOND, HALVES[1] | {"model.norm.weight": (8,)})
    write_safetensors(sharded / FIRST, HALVES[0] | {"model.norm.weight": (8,)})
    assert refusal(sharded) == ""
    write_safetensors(sharded / FIRST, HALVES[0] | {"model.norm.weight": (8,)}, fill=b"\1")
    assert f"model.norm.weight is in {FIRST} too, with other values" in refusal(sharded)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    """In its weights, in its header, or before it."""
    file = write_model(tmp_path, CONFIG) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    numbers = f"{len(whole) - 10:,} of {len(whole):,} bytes"
    assert f"is cut off after {numbers}" in refusal(tmp_path)
    file.write_bytes(whole + b"0000")
    assert "which are more than" in refusal(tmp_path)
    for size in (100, 9, 3, 0):
        file.write_bytes(whole[:size])
        assert "model.safetensors: is no safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "F32 of shape [3] takes 12"),
        ({"dtype": "F32", "shape": [2]}, "is no safetensors file"),
        ([], "is no safetensors file"),
    ],
)  # fmt: skip
def test_a_header_that_does_not_add_up_is_refused(
    tmp_path: Path, entry: object, message: str
) -> None:
    """Another program's reader would stop there, or read another tensor's bytes."""
    header = json.dumps({"a": entry}).encode()
    write_model(tmp_path, CONFIG)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert message in refusal(tmp_path)


def test_a_name_that_a_header_has_twice_is_refused(tmp_path: Path) -> None:
    """JSON readers take the last one."""
    entry = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    header = f'{{"a":{entry},"a":{entry}}}'.encode()
    write_model(tmp_path, CONFIG)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert "a is named twice" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_told(tmp_path: Path, name: str) -> None:
    """`git clone` without LFS leaves such a text in place of the file."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (write_model(tmp_path, CONFIG) / name).write_text(pointer)
    assert f"{name}: is a pointer of Git LFS" in refusal(tmp_path)


def test_a_directory_of_pickles_is_refused(tmp_path: Path) -> None:
    """With the way out."""
    (write_model(tmp_path, CONFIG) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin may hold a pickle" in refusal(tmp_path)
    assert "save_pretrained" in refusal(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    """None at all, or under a name that nobody reads."""
    (write_model(tmp_path, CONFIG) / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert "weights.safetensors is not read: rename it" in refusal(tmp_path)
    (tmp_path / "weights.safetensors").unlink()
    assert "has no .safetensors file" in refusal(tmp_path)


def test_the_file_that_config_json_names_is_read(tmp_path: Path) -> None:
    """As transformers does."""
    config = CONFIG | {"transformers_weights": "weights.safetensors"}
    (write_model(tmp_path, config) / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert refusal(tmp_path) == ""


W, B, R = "linear.weight", "linear.bias", "residual.weight"


def write_layer(directory: Path, kind: str, settings: Any, shapes: Shapes | None) -> Path:
    """A sentence encoder of width 8 with a layer behind the pooling; of None no weights."""
    write_model(directory, config_of("bert", "embed"), engine="embed")
    layer = {"type": f"sentence_transformers.models.{kind}", "path": f"2_{kind}"}
    write_json(directory / "modules.json", [*MODULES, layer])
    folder = directory / f"2_{kind}"
    folder.mkdir()
    write_json(folder / "config.json", settings)
    if shapes is not None:
        write_safetensors(folder / "model.safetensors", shapes)
    return directory


@pytest.mark.parametrize(
    ("settings", "shapes", "reason"),
    [
        ({}, {W: (4, 8), B: (4,)}, ""),
        ({"bias": False}, {W: (4, 8)}, ""),
        ({"use_residual": True, "bias": False}, {W: (4, 8), R: (4, 8)}, ""),
        ({"use_residual": True, "bias": False, "out_features": 8}, {W: (8, 8)}, ""),
        ({}, None, "2_Dense/model.safetensors: is missing; fetch"),
        ({}, {W: (4, 8)}, "has no linear.bias, 2_Dense/config.json asks for [4]"),
        ({}, {W: (8, 4), B: (4,)}, "linear.weight has the shape [8, 4], 2_Dense/config.json"),
        ({"bias": False}, {W: (4, 8), B: (4,)}, "has linear.bias, which 2_Dense/config.json does"),
        ({"use_residual": True, "bias": False}, {W: (4, 8)}, "has no residual.weight"),
        ({"bias": False}, {}, "has no linear.weight"),
        ({"activation_function": "my.Own"}, None, "names the activation 'my.Own'"),
        ({"activation_function": "torch.nn.Bilinear"}, None, "the activation 'torch.nn.Bilinear'"),
        ({"activation_function": None}, None, "the activation None"),
        ({"bias": "yes"}, None, "bias 'yes', which is not true or false"),
        ({"use_residual": 1}, None, "use_residual 1, which is not"),
        ({"in_features": 16}, None, "takes vectors of 16 numbers, they have 8 there"),
        ({"out_features": 0}, None, "out_features 0, which is no size"),
    ],
)
def test_a_dense_layer_has_the_weights_that_its_settings_ask_for(
    tmp_path: Path, settings: dict[str, Any], shapes: Shapes | None, reason: str
) -> None:
    """Vectors without the bias, or without the way around, would be others, without an error."""
    sizes = {"in_features": 8, "out_features": 4}
    found = refusal(write_layer(tmp_path, "Dense", sizes | settings, shapes))
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("settings", "shapes", "reason"),
    [
        ({"dimension": 8}, {"norm.weight": (8,), "norm.bias": (8,)}, ""),
        ({"dimension": 8}, None, "is missing; fetch the weights of the LayerNorm layer"),
        ({"dimension": 8}, {"norm.weight": (8,)}, "has no norm.bias"),
        ({"dimension": 9}, None, "takes vectors of 9 numbers, they have 8 there"),
        ({}, None, "dimension None, which is no size"),
    ],
)
def test_a_norm_has_the_weights_that_its_settings_ask_for(
    tmp_path: Path, settings: dict[str, Any], shapes: Shapes | None, reason: str
) -> None:
    """A norm's weight and bias are checked like a dense layer's."""
    found = refusal(write_layer(tmp_path, "LayerNorm", settings, shapes))
    assert reason in found
    assert bool(found) == bool(reason)


def test_registration_raises_the_first_refusal(tmp_path: Path) -> None:
    """And says how many there are."""
    write_model(tmp_path, CONFIG, {name: shape for name, shape in SHAPES.items() if "norm" in name})
    with pytest.raises(ArtifactRefused, match=r"lm_head.*and 1 more: millstream models check"):
        model_from(tmp_path, "m")
