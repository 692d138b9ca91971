"""Engines by name. Each is imported only when it is built: the mock needs no torch."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from pydantic import validate_call

from gpu_worker.engine import Engine

ENGINES = {
    "mock": ("gpu_worker.engines.mock", "MockEngine.load"),
    "transformers": ("gpu_worker.engines.paged.loading", "load"),
    "remote": ("gpu_worker.engines.remote.engine", "RemoteEngine.load"),
    "embed": ("gpu_worker.engines.unary.embed", "EmbedEngine.load"),
    "classify": ("gpu_worker.engines.unary.classify", "ClassifyEngine.load"),
}


def free_memory() -> tuple[int, float]:
    """The bytes that are free on the device, and the part of them that one worker may fill."""
    _bound_spinning()
    memory = import_module("gpu_worker.engines.memory")
    device = memory.default_device()
    return memory.free_bytes(device), memory.SHARES[device.type]


def build(engine: str, directory: Path | None, options: Mapping[str, object]) -> Engine:
    """Load an engine, warm. Raises ValueError for an unknown engine or option, naming it."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; there are {', '.join(sorted(ENGINES))}")
    _bound_spinning()
    module, name = ENGINES[engine]
    load: Callable[..., Engine] = attrgetter(name)(import_module(module))
    return validate_call(load)(directory, **options)


def _bound_spinning() -> None:
    # How long threads spin at OpenMP's barriers before they sleep; read when torch is imported.
    # On two cores, Gemma at 32: without spinning 209 tokens/s, this 270 to 286, endlessly 305; with
    # a busy neighbour 154, 135 to 148 and 9: who spins keeps the core from whom it waits for.
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
