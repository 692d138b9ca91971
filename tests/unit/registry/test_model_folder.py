"""A folder that holds no model is refused with what it is, or lacks, and what to do about it."""

from pathlib import Path

import pytest

from registry.artifact_verification import ArtifactRefused
from registry.model_folder import check_model_folder
from tests.support.checkpoints import tokenizer_of, write_json
from tests.support.safetensors_files import write_adapter, write_safetensors

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


def make(directory: Path, *names: str) -> Path:
    """A folder with these files; weights and tokenisers are such, all others hold `{}`."""
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            write_safetensors(path, {"weight": (2, 2)})
        else:
            write_json(path, tokenizer_of(2) if name == TOKENIZER else {})
    directory.mkdir(exist_ok=True)
    return directory


@pytest.mark.parametrize(
    "more", [(), ("README.md", ".git/config"), ("1_Pooling/config.json",), ("onnx/model.onnx",)]
)
def test_a_whole_model_passes(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Whatever lies beside it that is not of its kind."""
    check_model_folder(make(tmp_path / "m", CONFIG, WEIGHTS, TOKENIZER, *more))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ((), "is empty; a model is a folder with"),
        ((".git/config",), "is empty"),
        (("README.md",), "has no config.json"),
        ((WEIGHTS, TOKENIZER), "has weights and no config.json: download all"),
        ((CONFIG, TOKENIZER), "has no .safetensors file: download"),
        ((CONFIG, TOKENIZER, "pytorch_model.bin"), "pytorch_model.bin may hold a pickle.*save"),
        ((CONFIG, WEIGHTS), "has no tokenizer.json: download it, or have transformers"),
        (("m.gguf",), "as GGUF.*must be converted.*gguf_file='m.gguf'"),
        ((CONFIG, "m.gguf"), "a GGUF.*must be converted"),
        ((CONFIG, "adapter_config.json"), "is an adapter.*--adapter-of"),
        (
            (CONFIG, WEIGHTS, TOKENIZER, "adapter_config.json"),
            "has a model and adapter_config.json.*--adapter-of",
        ),
        (("model_index.json", "unet/config.json"), "diffusers"),
        (("llama/config.json", "llama/model.safetensors"), "but llama in it has one: give"),
        (("snapshots/0a/config.json", "refs/main"), "but snapshots/0a in it has one"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_with_what_to_do(
    tmp_path: Path, names: tuple[str, ...], reason: str
) -> None:
    """One sentence, with the folder's own path."""
    with pytest.raises(ArtifactRefused, match=f"^{tmp_path}/m: [^\\n]*{reason}"):
        check_model_folder(make(tmp_path / "m", *names))


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    """Also one that peft has saved with its base's configuration."""
    folder = write_adapter(tmp_path / "lora")
    with pytest.raises(ArtifactRefused, match="lora: is an adapter"):
        check_model_folder(folder)
    with pytest.raises(ArtifactRefused, match="lora: is an adapter"):
        check_model_folder(make(folder, CONFIG, TOKENIZER))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("m.gguf", "is one GGUF file.*converted"), ("model.safetensors", "is a file; a model is")],
)
def test_a_file_is_no_folder(tmp_path: Path, name: str, reason: str) -> None:
    """A GGUF is the file that people have; of others their folder may be meant."""
    with pytest.raises(ArtifactRefused, match=reason):
        check_model_folder(make(tmp_path, name) / name)


def test_a_path_that_leads_nowhere_does_not_exist(tmp_path: Path) -> None:
    """A slip, or a link whose target is gone."""
    (tmp_path / "link").symlink_to("gone")
    for name in ("slip", "link"):
        with pytest.raises(ArtifactRefused, match=f"{name}: does not exist"):
            check_model_folder(tmp_path / name)
