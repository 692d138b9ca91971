"""Services as processes of their own, to be frozen and killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from streams.base_settings import ENV_PREFIX


class ServiceProcess:
    """A running `millstream <command>`; `environment` is for the process, not for its settings."""

    def __init__(
        self,
        command: str,
        log: Path,
        settings: dict[str, Any],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)
        }
        told = {ENV_PREFIX + key.upper(): str(value) for key, value in settings.items()}
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "millstream", command],
                env={**kept, **told, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self.process.terminate()

    def has_logged(self, event: str) -> bool:
        """True once an event of this name is in the log."""
        return f'"{event}"' in self.log.read_text()


@contextmanager
def service_process(
    command: str, nats_url: str, log: Path, **settings: Any
) -> Iterator[ServiceProcess]:
    """One service; killed at the end if it has not ended."""
    service = ServiceProcess(command, log, {"nats": nats_url, **settings})
    try:
        yield service
    finally:
        service.kill()


@contextmanager
def worker_process(nats_url: str, log: Path, **settings: Any) -> Iterator[ServiceProcess]:
    """A worker of the mock model."""
    with service_process("worker", nats_url, log, model='["mock"]', **settings) as service:
        yield service
