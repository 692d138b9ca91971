"""LoRA adapters as peft saves them: checks that one can be served with its model, or says why not.

An adapter's files say which modules of the model get `x Aᵀ Bᵀ · scale` added to their output
(Hu et al., https://arxiv.org/abs/2106.09685). Ranks are read from the weights' shapes.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.artifact_verification import (
    ArtifactRefused,
    combine_digests,
    hash_files,
    list_files,
    read_json,
)
from registry.checkpoints.families import FAMILIES
from registry.checkpoints.safetensors_header import Tensors, TensorShape, read_shapes
from registry.checkpoints.weight_files import read_weights
from registry.models import Adapter, EngineKind, Model, Version

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ENGINE = "transformers"  # the only engine that serves adapters
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_LAYER = re.compile(r"(?:^|\.)(\d+\..+)")
_EXPERT = re.compile(r"\.experts(\.|$)")
_ROUTER = re.compile(r"\.(mlp|block_sparse_moe|feed_forward)\.(gate|router)$")
_PLAIN = re.compile(r"[\w.]+")
# Initialisations that change the base model's weights, so that the adapter does not fit the base.
_CHANGES_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")

# Keys that are read here or have no effect after training; any other key must be unset.
_SERVED = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "use_rslora",
})  # fmt: skip


@dataclass(frozen=True)
class LoraPair:
    """The two low-rank matrices of one linear module, by their tensors' names.

    `a` has the shape `[rank, inputs]`, and `b` has `[outputs, rank]`.
    """

    a: str
    b: str
    rank: int
    inputs: int
    outputs: int


def adapter_from(directory: Path, name: str, model: Model, version: Version) -> Adapter:
    """Return the record of the LoRA adapter in `directory`, after checking that it can be served.

    `version` of `model` is what the adapter was trained on. Raises `ArtifactRefused` with the
    reason if it cannot be served. Reads and hashes every file: call it in a thread.
    """
    check_engine(directory, model.name, model.engine)
    found = read_adapter(directory, Path(version.directory) if version.directory else None)
    files = hash_files(directory)
    return Adapter(
        name=name,
        model=model.name,
        directory=str(directory.resolve()),
        files=files,
        digest=combine_digests(files),
        rank=max(pair.rank for pair in found.values()),
        parameters=count_parameters(found),
        targets=list_targets(found),
    )


def check_engine(directory: Path, model: str, engine: EngineKind) -> None:
    """Raise `ArtifactRefused` if the engine of an adapter's `model` serves no adapters."""
    if engine != ENGINE:
        reason = f"is no adapter for {model!r}: the engine {engine!r} serves none"
        raise ArtifactRefused(str(directory), reason)


def read_adapter(directory: Path, base: Path | None) -> dict[str, LoraPair]:
    """Return the low-rank pairs of the LoRA adapter in `directory`, by module.

    `base` is the directory of its model, None without local files: what can be checked without them
    is checked then. Raises `ArtifactRefused` with the reason if the adapter cannot be served.
    """
    if (directory / "config.json").exists() and not (directory / CONFIG).exists():
        raise ArtifactRefused(CONFIG, f"is missing; {directory} is a model: leave out --adapter-of")
    files = list_files(directory)
    for path in (CONFIG, WEIGHTS):
        if path not in files:
            raise ArtifactRefused(path, "is missing; an adapter is a directory that peft has saved")
    config = read_json(directory / CONFIG)
    check_config(config)
    found = pair_tensors(read_shapes(directory / WEIGHTS))
    for module, pair in found.items():
        lora_scale(config, module, pair.rank)
    known = _read_module_shapes(base)
    _check_modules(found, known)
    if _has_known_names(base):
        _check_complete(config, found, known)
    return found


def count_parameters(pairs: Mapping[str, LoraPair]) -> int:
    """Return how many numbers an adapter's matrices have."""
    return sum(pair.rank * (pair.inputs + pair.outputs) for pair in pairs.values())


def list_targets(pairs: Mapping[str, LoraPair]) -> list[str]:
    """Return the names of the modules that an adapter changes, such as `q_proj`, without paths."""
    return sorted({module.rpartition(".")[2] for module in pairs})


def check_config(config: Any) -> None:
    """Check that `config`, an adapter's `adapter_config.json`, asks for nothing beyond plain LoRA.

    Raises `ArtifactRefused` with the reason otherwise.
    """
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise ArtifactRefused(CONFIG, f"peft_type is {kind!r}; only 'LORA' is served")
    for key, value in config.items():
        if value and key not in _SERVED:
            raise ArtifactRefused(CONFIG, f"{key} is set, which is not served")
    if config.get("bias", "none") != "none":
        raise ArtifactRefused(CONFIG, f"bias is {config['bias']!r}; only 'none' is served")
    initialisation = str(config.get("init_lora_weights")).lower()
    if initialisation.startswith(_CHANGES_BASE):
        reason = (
            f"init_lora_weights {initialisation!r} has changed the base; save it converted to LoRA"
        )
        raise ArtifactRefused(CONFIG, reason)


def pair_tensors(tensors: Mapping[str, TensorShape]) -> dict[str, LoraPair]:
    """Return an adapter's A and B tensors as pairs, by the path of their module in the model.

    `tensors` are shapes by tensor name. Raises `ArtifactRefused` for a tensor that is no LoRA
    weight or has no counterpart, for shapes that do not fit each other, and if there are no
    tensors.
    """
    sides: dict[str, dict[str, str]] = {}
    for tensor in sorted(tensors):
        if not (match := _TENSOR.fullmatch(tensor)):
            raise ArtifactRefused(WEIGHTS, f"{tensor} is no LoRA weight of a linear layer")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise ArtifactRefused(WEIGHTS, "holds no tensors")
    return {module: _make_pair(module, names, tensors) for module, names in sides.items()}


def _make_pair(
    module: str, names: Mapping[str, str], tensors: Mapping[str, TensorShape]
) -> LoraPair:
    if missing := {"A", "B"} - names.keys():
        raise ArtifactRefused(WEIGHTS, f"{module} has no lora_{missing.pop()}")
    a, b = tensors[names["A"]], tensors[names["B"]]
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or 0 in a + b:
        raise ArtifactRefused(WEIGHTS, f"{module} has weights of {a} and {b}, which do not fit")
    return LoraPair(names["A"], names["B"], rank=a[0], inputs=a[1], outputs=b[0])


def lora_scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of a module's low-rank product: alpha / rank, or alpha / √rank (rsLoRA).

    Raises `ArtifactRefused` for an alpha that is not a finite number, or an alpha pattern that is
    not a plain path.
    """
    alpha = config.get("lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ArtifactRefused(CONFIG, f"alpha_pattern is {patterns!r}, not an object")
    for path, value in patterns.items():
        if not _PLAIN.fullmatch(path):
            raise ArtifactRefused(CONFIG, f"alpha_pattern {path!r} is no plain name of modules")
        if f".{module}".endswith(f".{path}"):
            alpha = value
            break
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ArtifactRefused(CONFIG, f"the alpha of {module} is {alpha!r}, not a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check_modules(found: Mapping[str, LoraPair], known: Mapping[str, set[TensorShape]]) -> None:
    """Raise `ArtifactRefused` for modules that the model lacks or has in another shape.

    `known` is empty where the model's files could not be read: then only the paths are checked.
    """
    for module, pair in found.items():
        if _EXPERT.search(module):
            reason = f"{module} is of an expert: adapters of experts are not served; train one of "
            raise ArtifactRefused(WEIGHTS, reason + "the attention, or serve it with vLLM")
        place = _path_in_layer(module)
        if place is None:
            raise ArtifactRefused(WEIGHTS, f"{module} is in no layer; only those are served")
        if not known:
            continue
        if place not in known:
            raise ArtifactRefused(WEIGHTS, f"{module} is no module of the model")
        if (pair.outputs, pair.inputs) not in known[place]:
            is_, fits = min(known[place]), (pair.outputs, pair.inputs)
            raise ArtifactRefused(WEIGHTS, f"{module} fits {fits}, the model's is {is_}")


def _check_complete(
    config: Mapping[str, Any],
    found: Mapping[str, LoraPair],
    known: Mapping[str, set[TensorShape]],
) -> None:
    """Raise `ArtifactRefused` if modules that the configuration adapts have no weights.

    Configurations that choose layers by their numbers or by a pattern are not checked.
    """
    wanted = config.get("target_modules")
    chooses = any(config.get(key) for key in ("layers_to_transform", "exclude_modules"))
    if chooses or not isinstance(wanted, list) or any(map(_names_a_layer, wanted)):
        return
    linear = (path for path, shapes in known.items() if len(min(shapes)) == 2)
    adapted = {path for path in linear if f".{path}".endswith(tuple(f".{name}" for name in wanted))}
    if missing := sorted(adapted - set(map(_path_in_layer, found))):
        reason = f"has no weights for {len(missing)} of the {len(adapted)} modules that "
        reason += f"target_modules of {CONFIG} names: layer {missing[0]} is one; save it again"
        raise ArtifactRefused(WEIGHTS, reason)


def _names_a_layer(target: object) -> bool:
    return any(part.isdigit() for part in str(target).split("."))


def _has_known_names(base: Path | None) -> bool:
    """Return whether the names in the model's files are those of its layers, and of no others.

    A model with a second tower, or with experts in one tensor, has modules that peft calls or
    counts otherwise.
    """
    return str(_read_config(base).get("model_type")) in FAMILIES


def _read_module_shapes(base: Path | None) -> dict[str, set[TensorShape]]:
    """Return the shapes of a model's weights by path in the layer; empty without local files.

    Those of experts and their routers are left out, since no linear module computes them.
    """
    found: dict[str, set[TensorShape]] = {}
    for tensor, header in _read_tensors(base).items():
        module = tensor.removesuffix(".weight")
        place = _path_in_layer(module)
        if place and not _EXPERT.search(module) and not _ROUTER.search(module):
            found.setdefault(place, set()).add(header.shape)
    return found


def _read_tensors(base: Path | None) -> Tensors:
    """Return the tensors of a model's weight files; empty where they cannot be read."""
    try:
        return read_weights(base, _read_config(base))[0] if base else {}
    except ArtifactRefused:
        return {}


def _read_config(base: Path | None) -> dict[str, Any]:
    """Return the content of a model's config.json; empty without one."""
    config = read_json(base / "config.json") if base and (base / "config.json").exists() else None
    return config if isinstance(config, dict) else {}


def _path_in_layer(module: str) -> str | None:
    """Return a module's path from its layer's number on; None outside the layers.

    The part before the number differs between formats.
    """
    match = _LAYER.search(module)
    return match[1] if match else None
