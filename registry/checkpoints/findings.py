"""Findings of a check of a model directory: refusals and warnings."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a file of a model directory, and what to do instead.

    `path` is relative to the directory. A refusal keeps the model from being registered; anything
    else is a warning.
    """

    path: str
    reason: str
    is_refusal: bool = True
