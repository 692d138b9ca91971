"""Activations by the names that the registry knows."""

from torch import nn

from registry.sentence_encoder import ACTIVATIONS


def build_activation(name: str) -> nn.Module:
    """Return a new activation layer; `name` is one of `ACTIVATIONS`."""
    assert name in ACTIVATIONS, name
    made: nn.Module = getattr(nn, name)()
    return made
