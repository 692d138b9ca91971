"""Artifacts: only data is taken, and it stays what was registered."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from registry.artifact_verification import (
    ArtifactChanged,
    ArtifactRefused,
    combine_digests,
    hash_files,
    list_unread_files,
    verify_files,
)

WEIGHTS = b"\x08" * 100_000


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A directory as `save_pretrained` leaves it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    return tmp_path


def test_every_file_is_hashed_and_documentation_is_not(version: Path) -> None:
    """The digest is of what the model does, not of its licence."""
    for name in ("README.md", "LICENSE", ".gitattributes", "USE_POLICY.md"):
        (version / name).write_text("words")
    files = hash_files(version)
    assert list(files) == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert files["model.safetensors"] == hashlib.sha256(WEIGHTS).hexdigest()


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin", "training_args.bin", "tf_model.h5", "a.pt", "a.PTH", "a.pkl", "a.npz",
        "modeling.py", "a.exe", "a", "onnx/model.onnx", "onnx/model.onnx_data", "eval.csv",
        "config.yaml", "mergekit_config.yml", "tokenizer.model.v3", "flax_model.msgpack",
        "openvino/openvino_model.xml", "original/consolidated.00.pth", "rust_model.ot",
    ],
)  # fmt: skip
def test_what_no_engine_reads_is_no_part_of_the_version(version: Path, name: str) -> None:
    """Directories of the Hub have it; neither its presence nor its content matters."""
    before = hash_files(version)
    (version / name).parent.mkdir(exist_ok=True)
    (version / name).write_bytes(b"x")
    assert hash_files(version) == before
    assert list_unread_files(version) == [name]
    verify_files(version, before)


@pytest.mark.parametrize("target", ["/etc/hostname", "config.json", "1_Pooling"])
def test_symbolic_links_are_refused(version: Path, target: str) -> None:
    """A link could lead to any file of the machine, or change what it means later."""
    (version / "vocab.json").symlink_to(target)
    with pytest.raises(ArtifactRefused, match=r"vocab.json: is a symbolic link"):
        hash_files(version)


def test_a_pipe_is_refused(version: Path) -> None:
    """A reader would wait for ever."""
    os.mkfifo(version / "vocab.json")
    with pytest.raises(ArtifactRefused, match=r"vocab.json: is no regular file"):
        hash_files(version)


@pytest.mark.parametrize("name", ["pytorch_model-00001.bin", "weights.dat", "README.md"])
def test_weights_that_are_not_hashed_are_not_loaded(version: Path, name: str) -> None:
    """The loader opens what the index, or config.json, names, whatever its kind."""
    (version / "config.json").write_text(json.dumps({"transformers_weights": name}))
    with pytest.raises(ArtifactRefused, match=rf"config.json: names {name}"):
        hash_files(version)
    (version / "config.json").write_text("{}")
    (version / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ArtifactRefused, match=rf"index.json: names {name}"):
        hash_files(version)


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "a/../../b"])
def test_a_shard_index_cannot_lead_out_of_the_directory(version: Path, shard: str) -> None:
    """The loader opens whatever the index names."""
    index = {"weight_map": {"layer": shard}}
    (version / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactRefused, match="leads out"):
        hash_files(version)


def test_a_shard_index_cannot_name_what_is_not_hashed(version: Path) -> None:
    """Hidden files are left out of a version; the loader would open them all the same."""
    index = {"weight_map": {"layer": ".cache/model.safetensors"}}
    (version / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactRefused, match="hidden"):
        hash_files(version)


def test_a_sentence_encoder_cannot_bring_its_own_modules(version: Path) -> None:
    """sentence-transformers imports the class that modules.json names."""
    modules = [{"type": "custom_st.Transformer", "path": ""}]
    (version / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ArtifactRefused, match="custom_st"):
        hash_files(version)


def test_broken_json_is_refused_by_name(version: Path) -> None:
    """A truncated download must be seen when it is registered, not when it is loaded."""
    (version / "tokenizer.json").write_text("{")
    with pytest.raises(ArtifactRefused, match=r"tokenizer.json: is not JSON"):
        hash_files(version)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    """A typing error in the path is told as such."""
    with pytest.raises(ArtifactRefused, match="nowhere: is not a directory"):
        hash_files(tmp_path / "nowhere")


def test_unchanged_files_verify(version: Path) -> None:
    """The common case: the worker loads what was registered."""
    verify_files(version, hash_files(version))


def test_the_first_file_that_differs_is_named(version: Path) -> None:
    """An operator wants to know which download to repeat."""
    files = hash_files(version)
    (version / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ArtifactChanged, match=r"model.safetensors: has sha256"):
        verify_files(version, files)
    os.remove(version / "config.json")
    with pytest.raises(ArtifactChanged, match=r"config.json: is missing"):
        verify_files(version, files)


def test_a_file_that_was_added_later_is_found(version: Path) -> None:
    """A new generation_config.json changes what the model says as much as new weights do."""
    files = hash_files(version)
    (version / "generation_config.json").write_text("{}")
    with pytest.raises(ArtifactChanged, match=r"generation_config.json: was not there"):
        verify_files(version, files)


def test_a_record_cannot_name_files_outside_the_directory(version: Path) -> None:
    """Whoever can write the registry must not read a worker's disk."""
    with pytest.raises(ArtifactRefused, match="leads out"):
        verify_files(version, {"../../etc/passwd": "0" * 64})


def test_the_digest_depends_on_names_and_contents_alone() -> None:
    """The same files give the same version id on any machine."""
    files = {"a": "1" * 64, "b": "2" * 64}
    assert combine_digests(files) == combine_digests(dict(reversed(files.items())))
    assert combine_digests(files) != combine_digests({"a": "2" * 64, "b": "1" * 64})
