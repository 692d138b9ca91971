"""LoRA in one forward pass of many sequences: `x Aᵀ Bᵀ · scale` added to their rows of outputs."""

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
from registry.artifact_verification import ArtifactRefused, read_verified
from registry.lora_inspection import CONFIG, WEIGHTS, LoraPair, lora_scale, pair_tensors
from streams.messages import AdapterRef


@dataclass(frozen=True)
class LoraTarget:
    """A linear layer that a LoRA adapter may add to: some output columns of `module`.

    They are `outputs` columns from `first_column` on, since several layers may be merged into one
    module. `inputs` is the layer's input size.
    """

    module: nn.Module
    inputs: int
    outputs: int
    first_column: int = 0


LoraTargets = Mapping[str, LoraTarget]


def find_targets(model: nn.Module) -> LoraTargets:
    """Return all linear layers of a model, by the module path that adapter files name them by.

    Layers that were merged keep their own paths.
    """
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
    """The weights of an adapter on its device, by module path.

    Each pair is A `[rank, inputs]` and B `[outputs, rank]`, with the adapter's scale multiplied
    into B.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]


def load_lora(
    adapter: AdapterRef, targets: LoraTargets, dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """Read an adapter's files, check them against a model's targets, and return the weights.

    Reads files and copies to the device, so call it in a thread. Raises `ArtifactChanged` for files
    that are not the registered ones, and `ArtifactRefused` for modules that the model lacks or
    whose shape differs.
    """
    config = json.loads(_read(adapter, CONFIG))
    tensors = read_tensors(_read(adapter, WEIGHTS))
    loaded = {}
    for module, pair in pair_tensors({name: tuple(t.shape) for name, t in tensors.items()}).items():
        _check_shape(module, pair, targets)
        b = tensors[pair.b].float() * lora_scale(config, module, pair.rank)
        loaded[module] = tensors[pair.a].to(device, dtype), b.to(device, dtype)
    return LoraWeights(loaded)


def _read(adapter: AdapterRef, path: str) -> bytes:
    return read_verified(Path(adapter.directory), path, adapter.files[path])


def _check_shape(module: str, pair: LoraPair, targets: LoraTargets) -> None:
    if (target := targets.get(module)) is None:
        raise ArtifactRefused(WEIGHTS, f"{module} is no linear layer of the model")
    if (pair.inputs, pair.outputs) != (target.inputs, target.outputs):
        wanted, found = (target.inputs, target.outputs), (pair.inputs, pair.outputs)
        raise ArtifactRefused(WEIGHTS, f"{module} goes from {found}, the model's from {wanted}")


class LoraHooks:
    """Forward hooks on a model's layers that add adapters' outputs to the rows that use them.

    Hooks stay from one forward pass to the next until the set of adapters changes. While no adapter
    is in use there are no hooks.
    """

    def __init__(self, targets: LoraTargets) -> None:
        self._targets = targets
        self._rows: Mapping[LoraWeights, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    @property
    def is_active(self) -> bool:
        """True when forward passes now add the output of at least one adapter."""
        return bool(self._rows)

    def assign_rows(self, rows: Mapping[LoraWeights, Tensor]) -> None:
        """Set to which rows each adapter is added in forward passes from now on.

        `rows` holds row numbers, an int64 tensor on the model's device, by adapter. An empty
        mapping removes all hooks.
        """
        changed = rows.keys() != self._rows.keys()
        self._rows = rows
        if changed:
            self._replace_hooks()

    def _replace_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        paths = {path for weights in self._rows for path in weights.pairs}
        self._handles = [self._add_hook(path, self._targets[path]) for path in sorted(paths)]

    def _add_hook(self, path: str, target: LoraTarget) -> RemovableHandle:
        adapters = [(each, *each.pairs[path]) for each in self._rows if path in each.pairs]
        columns = slice(target.first_column, target.first_column + target.outputs)
        return target.module.register_forward_hook(partial(self._apply_lora, columns, adapters))

    def _apply_lora(
        self,
        columns: slice,
        adapters: list[tuple[LoraWeights, Tensor, Tensor]],
        module: nn.Module,
        inputs: tuple[Tensor],
        out: Tensor,
    ) -> None:
        """Add the adapters to one layer's output in place, by one pair of products each."""
        x = inputs[0].view(-1, inputs[0].shape[-1])
        target_columns = out.view(-1, out.shape[-1])[:, columns]
        for weights, a, b in adapters:
            rows = self._rows[weights]
            target_columns.index_add_(0, rows, linear(linear(x[rows], a), b))
