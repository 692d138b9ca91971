"""LoRA in the packed forward pass: `x Aᵀ Bᵀ · scale` added to some rows of some layers' outputs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load as read_tensors
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from gpu_worker.engines.paged.weights.linear_layers import MergedLinearPart, PackedLinear
from registry.artifacts import ArtifactRefused, read_verified
from registry.lora_adapters import CONFIG, WEIGHTS, LoraPair, lora_scale, pair_tensors
from streams.messages import AdapterRef


@dataclass(frozen=True)
class LoraTarget:
    """A linear layer: `outputs` columns, from `first` on, of what `module` makes of `inputs`.

    Where layers were fused into one module, each is some of its columns.
    """

    module: nn.Module
    inputs: int
    outputs: int
    first_column: int = 0


LoraTargets = Mapping[str, LoraTarget]


def find_targets(model: nn.Module) -> LoraTargets:
    """The linear layers of a model by their paths, as adapters name them."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, MergedLinearPart):
            found[path] = LoraTarget(
                module.merged_layer, module.in_features, module.out_features, module.first_column
            )
        elif isinstance(module, nn.Linear | PackedLinear):
            found[path] = LoraTarget(module, module.in_features, module.out_features)
    return found


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """An adapter in memory: A `[rank, inputs]` and scaled B `[outputs, rank]` by module path."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]


def load_lora(
    adapter: AdapterRef, known: LoraTargets, dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """Read an adapter for a model of these places. Slow: call it in a thread.

    Raises `ArtifactChanged` for files that are not the registered ones, `ArtifactRefused` for
    modules that the model lacks.
    """
    config = json.loads(_read(adapter, CONFIG))
    tensors = read_tensors(_read(adapter, WEIGHTS))
    loaded = {}
    for module, pair in pair_tensors({name: tuple(t.shape) for name, t in tensors.items()}).items():
        _check_shape(module, pair, known)
        b = tensors[pair.b].float() * lora_scale(config, module, pair.rank)
        loaded[module] = tensors[pair.a].to(device, dtype), b.to(device, dtype)
    return LoraWeights(loaded)


def _read(adapter: AdapterRef, path: str) -> bytes:
    return read_verified(Path(adapter.directory), path, adapter.files[path])


def _check_shape(module: str, pair: LoraPair, known: LoraTargets) -> None:
    if (place := known.get(module)) is None:
        raise ArtifactRefused(WEIGHTS, f"{module} is no linear layer of the model")
    if (pair.inputs, pair.outputs) != (place.inputs, place.outputs):
        wanted, found = (place.inputs, place.outputs), (pair.inputs, pair.outputs)
        raise ArtifactRefused(WEIGHTS, f"{module} goes from {found}, the model's from {wanted}")


class LoraHooks:
    """Hooks on a model's layers that add adapters to their outputs, while there are any to add.

    They stay from one forward pass to the next, until other adapters are to be added.
    """

    def __init__(self, known: LoraTargets) -> None:
        self._targets = known
        self._rows: Mapping[LoraWeights, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    @property
    def is_active(self) -> bool:
        return bool(self._rows)

    def assign_rows(self, rows: Mapping[LoraWeights, Tensor]) -> None:
        """Which packed rows get which adapter in the next forward pass; none costs nothing."""
        changed = rows.keys() != self._rows.keys()
        self._rows = rows
        if changed:
            self._replace_hooks()

    def _replace_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        paths = {path for weights in self._rows for path in weights.pairs}
        self._handles = [self._add_hook(path, self._targets[path]) for path in sorted(paths)]

    def _add_hook(self, path: str, place: LoraTarget) -> RemovableHandle:
        added = [(each, *each.pairs[path]) for each in self._rows if path in each.pairs]
        columns = slice(place.first_column, place.first_column + place.outputs)
        return place.module.register_forward_hook(partial(self._apply_lora, columns, added))

    def _apply_lora(
        self,
        columns: slice,
        added: list[tuple[LoraWeights, Tensor, Tensor]],
        module: nn.Module,
        inputs: tuple[Tensor],
        out: Tensor,
    ) -> None:
        """One layer's addition, in place: one pair of products per adapter."""
        x = inputs[0].view(-1, inputs[0].shape[-1])
        into = out.view(-1, out.shape[-1])[:, columns]
        for weights, a, b in added:
            rows = self._rows[weights]
            into.index_add_(0, rows, linear(linear(x[rows], a), b))
