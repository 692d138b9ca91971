"""Torch's threads must meet in the runtime that a worker chose, or in torch's own."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

from gpu_worker.engines import openmp_runtime

needs_library = pytest.mark.skipif(
    openmp_runtime._find_library() is None, reason="it is of x86-64 alone"
)


@needs_library
def test_torch_tells_the_chosen_runtime_how_many_threads_to_use() -> None:
    """Had torch bound libgomp, the other would not hear of it."""
    asked = _run(
        "openmp_runtime.load_runtime(); import ctypes, torch; torch.set_num_threads(7); "
        "print(ctypes.CDLL(str(openmp_runtime._find_library())).omp_get_max_threads())"
    )
    assert asked == "7"


@needs_library
def test_a_torch_that_is_there_already_keeps_its_own() -> None:
    """Two runtimes in one process would each start their own threads."""
    maps = _run(
        "import torch; openmp_runtime.load_runtime(); print(open('/proc/self/maps').read())"
    )
    assert "libgomp" in maps
    assert "libiomp5" not in maps


def _run(code: str) -> str:
    code = f"from gpu_worker.engines import openmp_runtime; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_spinning_is_bounded_unless_the_operator_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer spinning beside a busy neighbour gives 80 tokens/s instead of 180."""
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    openmp_runtime.load_runtime()
    assert os.environ["KMP_BLOCKTIME"] == "7"
    assert os.environ["GOMP_SPINCOUNT"] == "4000"


def test_without_the_package_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """ARM, or a machine where nobody wanted it."""

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(openmp_runtime, "files", missing)
    assert openmp_runtime._find_library() is None
