"""Checks that a folder holds a model that can be served, or says what it holds instead."""

from itertools import islice
from pathlib import Path

from registry.artifact_verification import PICKLES, ArtifactRefused
from registry.lora_inspection import CONFIG as ADAPTER_CONFIG
from registry.lora_inspection import WEIGHTS as ADAPTER_WEIGHTS
from registry.tokenizer.added_tokens import TOKENIZER

ADAPTER_BESIDE_MODEL = (
    f"has a model and {ADAPTER_CONFIG}: move the adapter's files to a folder of their own, and "
    "register it with --adapter-of, or remove them"
)
_WHOLE = f"a model is a folder with config.json, {TOKENIZER} and weights as .safetensors"


def check_model_folder(directory: Path) -> None:
    """Raise `ArtifactRefused` if `directory` holds no model, with what it is and what to do.

    Only names are looked at. Raises OSError if the folder cannot be read.
    """
    if reason := _find_fault(directory):
        raise ArtifactRefused(str(directory), reason)


def _find_fault(directory: Path) -> str | None:
    """Return why a folder cannot be a model's by the names in it; None if it can."""
    if not directory.exists():
        return "does not exist"
    if not directory.is_dir():
        return _describe_file(directory)
    if not (directory / "config.json").exists():
        return _describe_other_folder(directory)
    if not any(path.name != ADAPTER_WEIGHTS for path in directory.glob("*.safetensors")):
        return _describe_without_weights(directory)
    if (directory / ADAPTER_CONFIG).exists():
        return ADAPTER_BESIDE_MODEL
    if not (directory / TOKENIZER).exists():
        return (
            "has no tokenizer.json: download it, or have transformers write it from another "
            "tokeniser file (AutoTokenizer.from_pretrained, save_pretrained)"
        )
    return None


def _describe_file(file: Path) -> str:
    if file.suffix == ".gguf":
        return f"is one GGUF file. {_gguf_advice(file.name)}"
    return f"is a file; {_WHOLE}"


def _describe_other_folder(directory: Path) -> str:
    """Return what a folder without config.json is, as far as its names tell."""
    if (directory / ADAPTER_CONFIG).exists():
        return _adapter_advice()
    if (directory / "model_index.json").exists():
        return "is a pipeline of diffusers, which makes images; models of texts are served"
    if gguf := _first(directory, "*.gguf"):
        return f"has its model as GGUF. {_gguf_advice(gguf.name)}"
    if _first(directory, "*.safetensors"):
        return "has weights and no config.json: download all files of the model"
    for pattern in ("*/config.json", "*/*/config.json"):
        if config := _first(directory, pattern):
            within = config.parent.relative_to(directory)
            return f"has no config.json, but {within} in it has one: give {config.parent}"
    if not _first(directory, "*"):
        return f"is empty; {_WHOLE}"
    return f"has no config.json; {_WHOLE}"


def _describe_without_weights(directory: Path) -> str:
    if (directory / ADAPTER_CONFIG).exists():
        return _adapter_advice()
    if gguf := _first(directory, "*.gguf"):
        return f"has no .safetensors file, but a GGUF. {_gguf_advice(gguf.name)}"
    pickles = [path.name for path in directory.iterdir() if path.suffix in PICKLES]
    if pickles:
        return (
            f"has no .safetensors file; {min(pickles)} may hold a pickle, which can run code: take "
            "the model's safetensors, or have transformers save it as such (save_pretrained)"
        )
    return "has a config.json, but has no .safetensors file: download the weights, too"


def _adapter_advice() -> str:
    return (
        f"is an adapter ({ADAPTER_CONFIG}), not a model: register it for its model with "
        "`millstream models add PATH --name NAME --adapter-of MODEL`, or check it with "
        "`millstream models check PATH --adapter-of DIR`"
    )


def _gguf_advice(name: str) -> str:
    return (
        "It must be converted first: take the model's safetensors, or have transformers convert "
        f"it and its tokeniser (from_pretrained with gguf_file={name!r}, then save_pretrained)"
    )


def _first(directory: Path, pattern: str) -> Path | None:
    """Return the first path that matches and is not hidden."""
    found = (p for p in directory.glob(pattern) if not p.name.startswith("."))
    return next(iter(sorted(islice(found, 100))), None)
