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

from streams.accounts.access import UserClass
from streams.base_settings import ENV_PREFIX, new_id
from tests.support.accounts_server import process_settings, worker_pins


class ServiceProcess:
    """A running `millstream <command>`; `environment` is for the process, not for its settings.

    `program` is the module that runs it.
    """

    def __init__(
        self,
        command: str,
        log: Path,
        settings: dict[str, Any],
        environment: Mapping[str, str] = MappingProxyType({}),
        program: str = "millstream",
    ) -> None:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)
        }
        told = {ENV_PREFIX + key.upper(): str(value) for key, value in settings.items()}
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, command],
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
    """One service with a user of its own; killed at the end if it has not ended.

    Settings that are lists have one value. `program` is the module to run, not a setting.
    """
    program = settings.pop("program", "millstream")
    named = {"id": new_id(), **settings}
    pins = worker_pins(named["id"], [named["model"]]) if command == UserClass.WORKER else None
    creds = process_settings(nats_url, UserClass(command), named["id"], pins)
    told = {"nats": nats_url, **creds, **named}
    service = ServiceProcess(command, log, told, program=program)
    try:
        yield service
    finally:
        service.kill()


@contextmanager
def worker_process(nats_url: str, log: Path, **settings: Any) -> Iterator[ServiceProcess]:
    """A worker of the mock model."""
    with service_process("worker", nats_url, log, model="mock", **settings) as service:
        yield service
