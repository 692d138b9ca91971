"""Faster linear layers: those of one input merged into one product, on a CPU packed for oneDNN.

Two cores, 32 rows, float32: a packed product takes 0.6 to 0.8 of the time of an unpacked one. Only
the smallest matrices at one or two rows are slower, by some 20 microseconds. bfloat16 always gains.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from inspect import signature
from typing import Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from gpu_worker.engines.precision import has_bfloat16_matmul

ROWS_HINT = 32  # the batch size that the layout is chosen for; others work as well
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
GATED_CHILDREN = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# oneDNN's names of activations, and of their approximations
ACTIVATIONS = {
    type(ACT2FN["silu"]): ("swish", ""),
    type(ACT2FN["gelu_pytorch_tanh"]): ("gelu", "tanh"),
}


class PackedLinear(nn.Module):
    """A linear layer on a CPU whose weight is packed for oneDNN and can no longer be read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        weight = linear.weight.detach()
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)

    @classmethod
    def from_layer(cls, layer: nn.Module) -> Self:
        """Return the packed copy of a layer, which must be an `nn.Linear` (asserted)."""
        assert isinstance(layer, nn.Linear)
        return cls(layer)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the layer's output, without an activation."""
        return self.forward_activated(rows, "none", "")

    def forward_activated(self, rows: Tensor, activation: str, approximation: str) -> Tensor:
        """Return the layer's output after an activation, computed in one pass over memory.

        `activation` and `approximation` are a pair of `ACTIVATIONS`, or "none" and an empty string.
        """
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, activation, [], approximation
        )
        return out

    def forward_multiplied(self, rows: Tensor, factor: Tensor) -> Tensor:
        """Return the layer's output times `factor`, elementwise, in one pass over memory."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, factor, self._packed, self._bias, "mul"
        )
        return out


class GatedMLP(nn.Module):
    """A gated MLP, `down(act(gate(rows)) * up(rows))`, with activation and product fused, on a CPU.

    Fusing rounds twice instead of four times. Where an adapter adds to gate or up, only the rows
    that it changes are therefore computed again, unfused: the other rows must not depend on
    adapters.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj = PackedLinear.from_layer(mlp.get_submodule("gate_proj"))
        self.up_proj = PackedLinear.from_layer(mlp.get_submodule("up_proj"))
        self.down_proj = mlp.get_submodule("down_proj")
        self.act_fn = mlp.get_submodule("act_fn")
        self._activation = ACTIVATIONS[type(self.act_fn)]

    def forward(self, rows: Tensor) -> Tensor:
        """Return the MLP's output, adapters on its layers included."""
        gate = self.gate_proj.forward_activated(rows, *self._activation)
        inner = self.up_proj.forward_multiplied(rows, gate)
        if self.gate_proj._forward_hooks or self.up_proj._forward_hooks:
            inner = self._recompute_adapted(rows, inner)
        out: Tensor = self.down_proj(inner)
        return out

    def _recompute_adapted(self, rows: Tensor, inner: Tensor) -> Tensor:
        gate, up = self.gate_proj(rows), self.up_proj(rows)
        plain = self.gate_proj.forward(rows), self.up_proj.forward(rows)
        changed = (gate != plain[0]) | (up != plain[1])
        return torch.where(changed.any(-1, keepdim=True), self.act_fn(gate) * up, inner)


class MergedLinear(nn.Module):
    """Linear layers of the same input, computed in one product when the first of them is called.

    `parts` are the modules that take the places of these layers.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        sizes = [layer.out_features for layer in layers]
        self.linear: nn.Module = _concatenate(layers)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.parts = [
            MergedLinearPart(self, *column_range)
            for column_range in zip(layers, starts, sizes, strict=True)
        ]
        self._rows: Tensor | None = None
        self._out: Tensor | None = None
        self._parts_read = 0

    def compute_part(self, rows: Tensor, columns: slice) -> Tensor:
        """Return `columns` of the merged output for `rows`, computed by the first call alone.

        The output is kept until it was asked for once for each part, all with the same tensor
        `rows`.
        """
        if rows is not self._rows:
            self._rows, self._out, self._parts_read = rows, self.linear(rows), 0
        assert self._out is not None
        out = self._out[..., columns]
        self._parts_read += 1
        if self._parts_read == len(self.parts):
            self._rows = self._out = None
        return out


class MergedLinearPart(nn.Module):
    """The module in the place of a linear layer that was merged into a `MergedLinear`.

    Calling it returns what the replaced layer would: `out_features` columns of the merged output,
    from `first_column` on. The first part that is called computes that output for all of them.
    """

    def __init__(self, merged: MergedLinear, layer: nn.Linear, first: int, size: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.first_column = layer.in_features, size, first
        self._merged = (merged,)  # in a tuple: it is a child of the parent module, not of each part

    @property
    def merged_layer(self) -> nn.Module:
        """The linear layer that computes this part together with the others."""
        return self._merged[0].linear

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output of the replaced layer, computed together with its siblings'."""
        columns = slice(self.first_column, self.first_column + self.out_features)
        return self._merged[0].compute_part(rows, columns)


class _WatchedLinear(nn.Linear):
    """A linear layer that notes when its weight is read by others than its own `forward`."""

    def forward(self, input: Tensor) -> Tensor:
        parameters = self.__dict__["_parameters"]
        return linear(input, parameters["weight"], parameters["bias"])

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if name in ("weight", "bias"):
            self.__dict__["_was_read"] = True
        return super().__getattr__(name)


@contextmanager
def watch_reads(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yield a set that has, after the block, the linear layers whose weights were read in it.

    A layer that computes its output reads its own weights, which does not count. Some models read
    a layer's weights themselves, for its type or to compute with them: such a layer must stay.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = _WatchedLinear
    read: set[nn.Module] = set()
    try:
        yield read
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
            if layer.__dict__.pop("_was_read", False):
                read.add(layer)


def merge_and_pack(model: nn.Module, kept: Set[nn.Module] = frozenset()) -> None:
    """Merge linear layers of one input, in place; on a CPU also pack layers and fuse gated MLPs.

    Layers are packed where oneDNN supports their type. Unpacked weights are freed, unless an
    embedding shares them. Layers in `kept` stay as they are.
    """
    for parent in list(model.modules()):
        _fuse_gated_mlps(parent, kept)
    for parent in list(model.modules()):
        for names in SIBLINGS:
            _merge_siblings(parent, names, kept)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child not in kept and _is_plain(child) and _can_pack(child.weight):
                setattr(parent, name, PackedLinear(child))


def _fuse_gated_mlps(parent: nn.Module, kept: Set[nn.Module]) -> None:
    for name, child in list(parent.named_children()):
        if kept.isdisjoint(child.children()) and _is_gated(child):
            setattr(parent, name, GatedMLP(child))


def _is_gated(module: nn.Module) -> bool:
    """Return whether a module is a gated MLP and nothing more, whose gate and up can be packed."""
    children = dict(module.named_children())
    if children.keys() != GATED_CHILDREN or type(children["act_fn"]) not in ACTIVATIONS:
        return False
    pair = children["gate_proj"], children["up_proj"]
    can_pack = all(_is_plain(layer) and _can_pack(layer.weight) for layer in pair)
    return can_pack and _computes_gated(module)


def _computes_gated(mlp: nn.Module) -> bool:
    """Return whether an MLP computes just this formula: some models also clamp, scale or drop."""
    if len(signature(mlp.forward).parameters) != 1:
        return False
    names = "gate_proj", "up_proj", "down_proj", "act_fn"
    gate, up, down, activation = map(mlp.get_submodule, names)
    weight = gate.get_parameter("weight")
    row = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    rows = torch.stack([row, 1000 * row])  # the second row would exceed any clamp
    with torch.inference_mode():
        return torch.equal(mlp(rows), down(activation(gate(rows)) * up(rows)))


def _merge_siblings(parent: nn.Module, names: Sequence[str], kept: Set[nn.Module]) -> None:
    layers = [getattr(parent, name, None) for name in names]
    plain = [layer for layer in layers if _is_plain(layer) and layer not in kept]
    inputs = {(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in plain}
    if len(plain) < len(names) or len(inputs) > 1:
        return
    merged = MergedLinear(plain)
    parent.add_module("_".join(names), merged)
    for name, part in zip(names, merged.parts, strict=True):
        setattr(parent, name, part)


def _concatenate(layers: Sequence[nn.Linear]) -> nn.Linear:
    first, outputs = layers[0], sum(layer.out_features for layer in layers)
    with torch.device("meta"):
        joined = nn.Linear(first.in_features, outputs, bias=first.bias is not None)
    weight = torch.cat([layer.weight.detach() for layer in layers])
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if first.bias is not None:
        bias = torch.cat([layer.bias.detach() for layer in layers])
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


def _is_plain(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Return whether a layer is a plain `nn.Linear`: whole, or a rank's shard as plain tensors."""
    return type(layer) is nn.Linear and not isinstance(layer.weight, DTensor)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and has_bfloat16_matmul()
    )
