"""Replaces a tensor parallel model's sharded linear layers with plain ones of this rank's part."""

import re

from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank computes the part that its own share of the inputs adds.

    An all-reduce sums the ranks' parts, so that every rank gets the whole output.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias, linear.bias = linear.bias, None  # type: ignore[assignment]
        self.linear: nn.Module = linear

    def forward(self, rows: Tensor) -> Tensor:
        """Return the layer's whole output for this rank's share of the inputs.

        Every rank must call it, and each call waits for the others.
        """
        out: Tensor = self.linear(rows)
        distributed.all_reduce(out)
        return out if self.bias is None else out + self.bias


def replace_parallel_linears(model: PreTrainedModel) -> None:
    """Replace the column-wise and row-wise linear layers of a tensor parallel model, in place.

    The new layers compute the same on this rank's part of the weights as plain tensors. They avoid
    a distributed tensor's bookkeeping at each of a step's hundreds of products, and can be packed.
    Other layers, such as the embedding and the last one, stay.
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
