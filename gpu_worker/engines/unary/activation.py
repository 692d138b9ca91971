"""What configurations call an activation: the path of a class of torch's, by its last name."""

from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Identity": nn.Identity,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
}


def build_activation(path: str) -> nn.Module:
    """`torch.nn.modules.linear.Identity` and the like; raises ValueError for what is unknown."""
    name = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"the activation {path} is unknown here; one of {known} is possible")
    return ACTIVATIONS[name]()
