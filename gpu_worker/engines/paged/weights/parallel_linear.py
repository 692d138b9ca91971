"""A model whose layers are shared by the ranks of a group, made plain where that is simple."""

import re

from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


class RowParallelLinear(nn.Module):
    """A row-wise part of a linear layer: each rank has some of the inputs; all get the sum."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias, linear.bias = linear.bias, None  # type: ignore[assignment]
        self.linear: nn.Module = linear

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.linear(rows)
        distributed.all_reduce(out)
        return out if self.bias is None else out + self.bias


def replace_parallel_linears(model: PreTrainedModel) -> None:
    """Put plain layers in the place of transformers' column-wise and row-wise ones.

    They compute the same without a distributed tensor's bookkeeping at each of a step's hundreds of
    products, and can be packed. Others, as the embedding and the last layer, stay as they are.
    """
    for path, module in list(model.named_modules()):
        style = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style in ("colwise", "rowwise") and type(module) is nn.Linear:
            _keep_local_shard(module)
            if style == "rowwise":
                model.set_submodule(path, RowParallelLinear(module))


def _keep_local_shard(module: nn.Linear) -> None:
    """Make it a linear layer of this rank's part, with the class's own `forward`."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            local = parameter.to_local().detach().contiguous()
            setattr(module, name, nn.Parameter(local, requires_grad=False))
    module.out_features, module.in_features = module.weight.shape
    del module.forward
