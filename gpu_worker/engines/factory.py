"""Engines by name. Each is imported only when it is built: the mock needs no torch."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from pydantic import validate_call

from gpu_worker.engine import Engine

ENGINES = {
    "mock": ("gpu_worker.engines.mock", "MockEngine"),
    "transformers": ("gpu_worker.engines.paged.engine", "TransformersEngine"),
    "remote": ("gpu_worker.engines.remote.engine", "RemoteEngine"),
    "embed": ("gpu_worker.engines.embed", "EmbedEngine"),
}


def free_memory() -> tuple[int, float]:
    """The bytes that are free on the device, and the part of them that one worker may fill."""
    _quiet_barriers()
    memory = import_module("gpu_worker.engines.memory")
    device = memory.default_device()
    return memory.free_bytes(device), memory.SHARES[device.type]


def build(engine: str, directory: Path | None, options: Mapping[str, object]) -> Engine:
    """Load an engine, warm. Raises ValueError for an unknown engine or option, naming it."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; there are {', '.join(sorted(ENGINES))}")
    _quiet_barriers()
    module, name = ENGINES[engine]
    load: Callable[..., Engine] = getattr(import_module(module), name).load
    return validate_call(load)(directory, **options)


def _quiet_barriers() -> None:
    # Threads that spin at OpenMP's barriers starve the services beside them, and then each other:
    # 50 tokens/s instead of 105 with one busy neighbour on two cores. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
