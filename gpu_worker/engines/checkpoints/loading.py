"""Reads a checkpoint into a model, and refuses one whose tensors are not those of the model."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from gpu_worker.engines.checkpoints.dequantization import read_generation_config, weights_source
from gpu_worker.engines.device_memory import is_out_of_memory
from gpu_worker.engines.precision import choose_dtype
from registry.artifact_verification import ArtifactError
from registry.lora_inspection import CONFIG as ADAPTER_CONFIG
from registry.model_folder import ADAPTER_BESIDE_MODEL
from streams.errors import MillstreamError

log = structlog.get_logger()

NAMES_SHOWN = 8  # in a message that names tensors
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


class UnsupportedModel(MillstreamError):
    """This engine cannot run the model; the message names the architecture and the reason."""


class IncompleteCheckpoint(UnsupportedModel):
    """A checkpoint's tensors are not those of its model; the message names and counts them."""


def refuse_model(name: str, reason: str) -> UnsupportedModel:
    """Return the error for an architecture that this engine cannot run."""
    return UnsupportedModel(
        f"{name} cannot run on this engine: {reason}; serve it by a remote engine, such as vLLM"
    )


def read_config(directory: Path, device: torch.device) -> PreTrainedConfig:
    """Read a directory's configuration, whose dtype is then that of `choose_dtype`.

    Raises `UnsupportedModel` if transformers cannot read it.
    """
    dtype = choose_dtype(directory, device)  # the file may say "auto", which is none
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(  # a directory  # nosec B615
            directory, dtype=dtype, local_files_only=True
        )
    except Exception as error:  # whatever a type's own checks raise
        raise UnsupportedModel(
            f"config.json in {directory} cannot be read by transformers: {_shorten(error)}"
        ) from error
    return config


def _shorten(error: Exception) -> str:
    """Return an error of transformers as one line."""
    words = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(words.split())[:500]


def load_checkpoint(
    auto_class: type[Any],
    directory: Path,
    config: PreTrainedConfig,
    unused: str | None = None,
    **options: object,
) -> PreTrainedModel:
    """Load a model from a directory of safetensors, whole, in the dtype of its `config`.

    `auto_class` is the class of transformers that chooses the model's own. `config` is the result
    of `read_config`. `unused` is a regular expression for names of tensors that the caller never
    computes with, which may be missing. `options` go to `from_pretrained`. The model is not moved
    to a device. Raises `IncompleteCheckpoint` where a tensor is missing, has another shape, or
    belongs to the model and has no place in it; tied tensors and those that transformers declares
    optional may be missing. Other tensors without a place are logged. Raises `UnsupportedModel`
    where transformers cannot load the directory, and where an adapter lies beside the model, which
    transformers would apply only if peft is installed.
    """
    if (directory / ADAPTER_CONFIG).exists():
        raise UnsupportedModel(f"{directory} {ADAPTER_BESIDE_MODEL}")
    try:
        model_class, source = weights_source(auto_class, directory, config)
        model, report = model_class.from_pretrained(
            **source,
            dtype=config.dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported, with the names
            output_loading_info=True,
            **options,
        )
    except ArtifactError as error:
        raise UnsupportedModel(
            f"{name_architecture(config)} in {directory} cannot run on this engine: {error}"
        ) from error
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        name = name_architecture(config)
        raise UnsupportedModel(
            f"{name} in {directory} cannot be loaded by transformers: {_shorten(error)}"
        ) from error
    check_report(model, directory, report, unused)
    if "state_dict" in source:
        read_generation_config(model, directory)
    return model  # type: ignore[no-any-return]


def name_architecture(config: PreTrainedConfig) -> str:
    """Return the name of a configuration's architecture, or its model type if it names none."""
    return str((config.architectures or [config.model_type])[0])


def check_report(
    model: PreTrainedModel, directory: Path, report: dict[str, Any], unused: str | None
) -> None:
    """Raise `IncompleteCheckpoint` if `report`, which transformers made at load, shows a hole.

    Logs one event with the tensors of the checkpoint that are for something else. See
    `load_checkpoint`.
    """
    missing = {key for key in report["missing_keys"] if not (unused and re.search(unused, key))}
    tensors = (*model.named_parameters(), *model.named_buffers())
    missing |= {name for name, tensor in tensors if tensor.is_meta}
    unexpected = set(report["unexpected_keys"])
    misplaced = set(filter(_misplaced_tensor_finder(model), unexpected))
    faults = [
        _describe("is missing", "are missing", missing),
        _describe("has another shape", "have other shapes", _describe_shapes(report)),
        _describe("has no place in the model", "have no place in the model", misplaced),
    ]
    if any(faults):
        unused_count = len(unexpected - misplaced)
        unread = f" ({unused_count} of other names are in the files)" if unused_count else ""
        raise IncompleteCheckpoint(
            f"the weights in {directory} are not those of {type(model).__name__} as config.json "
            f"describes it: {'; '.join(filter(None, faults))}{unread}; use a complete checkpoint "
            "in the format of transformers, and the config.json that belongs to it"
        )
    if others := sorted(unexpected - misplaced):
        log.warning(
            "tensors_not_used",
            directory=str(directory),
            count=len(others),
            tensors=others[:NAMES_SHOWN],
        )


def _describe_shapes(report: dict[str, Any]) -> list[str]:
    return [
        f"{name} ({tuple(found)} instead of {tuple(wanted)})"
        for name, found, wanted in report["mismatched_keys"]
    ]


def _describe(one: str, many: str, names: Iterable[str]) -> str:
    """Return how many tensors have a fault and the names of the first; empty if there are none."""
    if not (ordered := sorted(names)):
        return ""
    shown = ", ".join(ordered[:NAMES_SHOWN])
    more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
    count = f"1 tensor {one}" if len(ordered) == 1 else f"{len(ordered)} tensors {many}"
    return f"{count}: {shown}{more}"


def _misplaced_tensor_finder(model: nn.Module) -> Callable[[str], bool]:
    """Return a function that tells whether a tensor without a place is one of the model's weights.

    It is if it would lie in a module that has weights, as scales and packed weights do, or if the
    model has weights of the same name in other layers, as those of a layer too many do.
    """
    modules = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    patterns = {_NUMBERS.sub("*", name) for name, _ in model.named_parameters()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def is_misplaced(tensor: str) -> bool:
        names = (tensor, tensor.removeprefix(prefix), prefix + tensor)
        return any(
            name.rpartition(".")[0] in modules or _NUMBERS.sub("*", name) in patterns
            for name in names
        )

    return is_misplaced
