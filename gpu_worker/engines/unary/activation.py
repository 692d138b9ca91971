"""Activations by the names that configurations give them: the path of a class of torch."""

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
    """Build an activation from a path like `torch.nn.modules.linear.Identity`.

    Raises ValueError for an unknown one.
    """
    name = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"the activation {path} is unknown here; one of {known} is possible")
    return ACTIVATIONS[name]()
