"""Replaces a tensor parallel model's sharded linear layers with plain ones of this rank's part."""

import re

from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


class RowParallelLinear(nn.Module):
    """A rank's share of a linear layer's inputs; an all-reduce sums the ranks' outputs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias, linear.bias = linear.bias, None  # type: ignore[assignment]
        self.linear: nn.Module = linear

    def forward(self, rows: Tensor) -> Tensor:
        """Return the layer's whole output; every rank must call it at the same time."""
        out: Tensor = self.linear(rows)
        distributed.all_reduce(out)
        return out if self.bias is None else out + self.bias


def replace_parallel_linears(model: PreTrainedModel) -> None:
    """Replace transformers' column-wise and row-wise linear layers by plain ones, in place.

    They compute the same without a distributed tensor's bookkeeping at each of a step's hundreds of
    products, and can be packed. Other layers, such as the embedding and the last one, stay.
    """
    for path, module in list(model.named_modules()):
        style = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style in ("colwise", "rowwise") and type(module) is nn.Linear:
            _keep_local_shard(module)
            if style == "rowwise":
                model.set_submodule(path, RowParallelLinear(module))


def _keep_local_shard(module: nn.Linear) -> None:
    """Turn a layer into a linear layer of this rank's part, with the class's own `forward`."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            local = parameter.to_local().detach().contiguous()
            setattr(module, name, nn.Parameter(local, requires_grad=False))
    module.out_features, module.in_features = module.weight.shape
    del module.forward
