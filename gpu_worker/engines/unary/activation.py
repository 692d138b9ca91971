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
    """Return a new activation layer for a path like `torch.nn.modules.linear.Identity`.

    The last part of the path decides. Raises ValueError if it is not in `ACTIVATIONS`, or if the
    path is not one of `torch.nn`.
    """
    name = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"the activation {path} is unknown here; one of {known} is possible")
    return ACTIVATIONS[name]()
