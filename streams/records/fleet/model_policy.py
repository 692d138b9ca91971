"""How many workers a model may have by the table `[fleet]`. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelPolicy:
    """Bounds on the workers of a model; with `min_workers` 0 it may rest without any.

    It does once nothing has been asked of it for `idle_seconds`.
    """

    min_workers: int = 0
    max_workers: int = 4
    idle_seconds: float = 300.0
