"""Builds engines by name. An engine's module is imported only then: the mock needs no torch."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from pydantic import validate_call

from gpu_worker.engines import openmp_runtime
from gpu_worker.engines.engine import Engine

ENGINES = {
    "mock": ("gpu_worker.engines.mock", "MockEngine.load"),
    "transformers": ("gpu_worker.engines.paged.engine_loader", "load"),
    "remote": ("gpu_worker.engines.remote.engine", "RemoteEngine.load"),
    "embed": ("gpu_worker.engines.unary.embed", "EmbedEngine.load"),
    "classify": ("gpu_worker.engines.unary.classify", "ClassifyEngine.load"),
}


def free_memory() -> tuple[int, float]:
    """Return the free bytes of the default device, and the share (0 to 1) one worker may fill.

    Imports torch, as engines with a model do.
    """
    openmp_runtime.load_runtime()
    memory = import_module("gpu_worker.engines.device_memory")
    device = memory.default_device()
    return memory.free_bytes(device), memory.SHARES[device.type]


def loaded_weight_bytes(directory: Path, files: Iterable[Path]) -> int:
    """Return the bytes that a model's weights, which are in `files`, take once they are loaded.

    That is more than the files where the device needs a wider dtype than they have. Imports torch.
    """
    openmp_runtime.load_runtime()
    device = import_module("gpu_worker.engines.device_memory").default_device()
    precision = import_module("gpu_worker.engines.precision")
    return int(precision.loaded_weight_bytes(directory, files, device))


def build(engine: str, directory: Path | None, options: Mapping[str, object]) -> Engine:
    """Import an engine by its name, load it from `directory` and warm it up; return it.

    Blocks until that is done. Raises ValueError for an unknown engine name and for an unknown or
    malformed option, which it names; raises what loading raises.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; there are {', '.join(sorted(ENGINES))}")
    openmp_runtime.load_runtime()
    module, name = ENGINES[engine]
    load: Callable[..., Engine] = attrgetter(name)(import_module(module))
    return validate_call(load)(directory, **options)
