"""Fixtures shared by all tiers: a real nats-server per test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker.engines import openmp
from tests.support.nats_server import NatsServer

# Before anything imports torch. With AMX, oneDNN rounds bfloat16 by how many rows a product has;
# these kernels do not, so that tests may compare bits on every x86 (docs/engine.md, "Exactness").
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
openmp.load_runtime()
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's own library reads it as well, at its import


PROCESSES = ("tests/integration/", "tests/e2e/", "tests/chaos/test_fault_scenarios.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs real processes against real limits of time is tried twice, and shown as rerun.

    Beside other load on two cores, whole runs had another single failure each; a rule that is
    broken fails both times.
    """
    for item in items:
        if item.nodeid.startswith(PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    store = tmp_path / "nats"
    store.mkdir()
    server = NatsServer(store)
    yield server
    server.kill()


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url
