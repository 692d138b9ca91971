"""What starts without torch: the base install does not have it."""

import subprocess
import sys

import pytest

ABSENT = ("torch", "transformers", "accelerate", "gguf", "safetensors", "httpx2")


def start(code: str) -> subprocess.CompletedProcess[str]:
    absent = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}));"
    return subprocess.run([sys.executable, "-c", absent + code], capture_output=True, text=True)


@pytest.mark.parametrize("service", ["gateway", "dispatcher"])
def test_a_service_starts_without_torch(service: str) -> None:
    """The base install does not have it."""
    run = start(f"import {service}.service, millstream.cli")
    assert (run.returncode, run.stderr) == (0, "")


def test_the_factory_builds_the_mock_without_torch() -> None:
    """Gateway and dispatcher machines run it too."""
    run = start(
        "from gpu_worker.engines.factory import build;"
        "build('mock', None, {'ttft_ms': '1', 'sequences': 3})"
    )
    assert (run.returncode, run.stderr) == (0, "")
