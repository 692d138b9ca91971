"""A tensor parallel engine over a tiny model, and the processes that it has."""

from pathlib import Path

import psutil

from gpu_worker.engines.paged import engine_loader
from gpu_worker.engines.paged.engine import TransformersEngine
from tests.engine import tiny_models


def save_model(architecture: str, directory: Path) -> Path:
    return tiny_models.save(tiny_models.model(architecture), directory)


def load_engine(directory: Path, ranks: int = 2) -> TransformersEngine:
    """Chunked, and with a pool that preempts."""
    return engine_loader.load(
        directory,
        device="cpu",
        threads=2,
        tensor_parallel_size=ranks,
        max_sequences=4,
        max_batch_tokens=40,
        kv_tokens=160,
    )


def followers() -> list[psutil.Process]:
    """This process's further ranks."""
    return [
        p
        for p in psutil.Process().children()
        if "paged.tensor_parallel_rank" in " ".join(p.cmdline())
    ]
