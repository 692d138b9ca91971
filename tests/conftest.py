"""Fixtures shared by all tiers: a real nats-server per test."""

import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from gpu_worker.engines import openmp_runtime
from tests.support.accounts_server import AccountsServer, unguard
from tests.support.stall_watch import MachineStalled, StallWatch, is_of_time

# Before anything imports torch. With AMX, oneDNN rounds bfloat16 by how many rows a product has;
# these kernels do not, so that tests may compare bits on every x86 (docs/engine-design.md,
# "Exactness").
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
openmp_runtime.load_runtime()
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's own library reads it as well, at its import


# Found examples are of this commit, not of chance; a busy core may stall any of them.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


# A run that is ended leaves no server and no cell behind.
signal.signal(signal.SIGTERM, signal.default_int_handler)


# What a command prints on stdout is its JSON alone, as in a process of its own. Looked up for each
# line, since pytest replaces it.
structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


stall_watch = StallWatch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Tell failures during a stall of the machine from others: `--only-rerun` runs these again.

    Any other error than of an expectation or by a timeout is one however slow the machine is.
    """
    began = time.monotonic()
    try:
        return (yield)
    except Exception as error:
        if is_of_time(error) and (stalled := stall_watch.longest_since(began)):
            raise MachineStalled(f"for {stalled:.1f} s; {error!r}") from error
        raise


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[AccountsServer]:
    """A server with accounts; who tries what it may not fails the test."""
    store = tmp_path / "nats"
    store.mkdir()
    yield from guarded(AccountsServer(store))


def guarded(server: AccountsServer) -> Iterator[AccountsServer]:
    yield server
    server.kill()
    unguard(server.url)
    assert server.violations() == []


@pytest.fixture
def nats_url(nats_server: AccountsServer) -> str:
    return nats_server.url


@pytest.fixture(scope="module")
def shared_nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one server for all tests of a module, which must leave it unharmed."""
    for server in guarded(AccountsServer(tmp_path_factory.mktemp("nats"))):
        yield server.url
