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

from gpu_worker.engines.paged.packing import PackedLinear, Part
from registry.adapters import CONFIG, WEIGHTS, Pair, pairs, scale
from registry.artifacts import ArtifactRefused, read_verified
from streams.messages import Adapter


@dataclass(frozen=True)
class Place:
    """A linear layer: `outputs` columns, from `first` on, of what `module` makes of `inputs`.

    Where layers were fused into one module, each is some of its columns.
    """

    module: nn.Module
    inputs: int
    outputs: int
    first: int = 0


Places = Mapping[str, Place]


def places(model: nn.Module) -> Places:
    """The linear layers of a model by their paths, as adapters name them."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, Part):
            found[path] = Place(module.whole, module.in_features, module.out_features, module.first)
        elif isinstance(module, nn.Linear | PackedLinear):
            found[path] = Place(module, module.in_features, module.out_features)
    return found


@dataclass(frozen=True, eq=False)
class Weights:
    """An adapter in memory: A `[rank, inputs]` and scaled B `[outputs, rank]` by module path."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]


def load(adapter: Adapter, known: Places, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read an adapter for a model of these places. Slow: call it in a thread.

    Raises `ArtifactChanged` for files that are not the registered ones, `ArtifactRefused` for
    modules that the model lacks.
    """
    config = json.loads(_read(adapter, CONFIG))
    tensors = read_tensors(_read(adapter, WEIGHTS))
    loaded = {}
    for module, pair in pairs({name: tuple(t.shape) for name, t in tensors.items()}).items():
        _check(module, pair, known)
        b = tensors[pair.b].float() * scale(config, module, pair.rank)
        loaded[module] = tensors[pair.a].to(device, dtype), b.to(device, dtype)
    return Weights(loaded)


def _read(adapter: Adapter, path: str) -> bytes:
    return read_verified(Path(adapter.directory), path, adapter.files[path])


def _check(module: str, pair: Pair, known: Places) -> None:
    if (place := known.get(module)) is None:
        raise ArtifactRefused(WEIGHTS, f"{module} is no linear layer of the model")
    if (pair.inputs, pair.outputs) != (place.inputs, place.outputs):
        wanted, found = (place.inputs, place.outputs), (pair.inputs, pair.outputs)
        raise ArtifactRefused(WEIGHTS, f"{module} goes from {found}, the model's from {wanted}")


class Additions:
    """Hooks on a model's layers that add adapters to their outputs, while there are any to add.

    They stay from one forward pass to the next, until other adapters are to be added.
    """

    def __init__(self, known: Places) -> None:
        self._places = known
        self._rows: Mapping[Weights, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    @property
    def active(self) -> bool:
        return bool(self._rows)

    def set(self, rows: Mapping[Weights, Tensor]) -> None:
        """Which packed rows get which adapter in the next forward pass; none costs nothing."""
        changed = rows.keys() != self._rows.keys()
        self._rows = rows
        if changed:
            self._replace_hooks()

    def _replace_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        paths = {path for weights in self._rows for path in weights.pairs}
        self._handles = [self._hook(path, self._places[path]) for path in sorted(paths)]

    def _hook(self, path: str, place: Place) -> RemovableHandle:
        added = [(each, *each.pairs[path]) for each in self._rows if path in each.pairs]
        columns = slice(place.first, place.first + place.outputs)
        return place.module.register_forward_hook(partial(self._add, columns, added))

    def _add(
        self,
        columns: slice,
        added: list[tuple[Weights, Tensor, Tensor]],
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
