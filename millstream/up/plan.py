"""Which processes `millstream up` runs, and what each is told.

Settings and the key travel by environment: a command line is for everybody to read, and names one
service only.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from millstream.settings import UpSettings
from millstream.sources import PREFIX
from millstream.up import broker
from millstream.up.child import Program

# In the order in which they stop: a service's part of the time to drain, and the seconds that it
# may take beyond, to say goodbye (a gateway to every open socket), before it is killed.
SHARES = {"gateway": 0.4, "worker": 0.3, "dispatcher": 0.15, "nats": 0.15}
CLOSING_SECONDS = {"gateway": 2.5, "worker": 1.0, "dispatcher": 0.3, "nats": 0.2}

# glibc keeps freed memory instead of giving it back: engines allocate the same blocks every step.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
_NOT_PASSED_ON = {PREFIX + key for key in ("ID", "MODEL", "API_KEY")}


@dataclass(frozen=True)
class Plan:
    """Everything that the children need to know, decided once."""

    settings: UpSettings
    port: int
    nats_port: int
    key: str
    models: tuple[str, ...]

    @property
    def nats(self) -> str:
        return broker.url(self.nats_port)

    @property
    def url(self) -> str:
        host = self.settings.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}"

    def seconds(self, service: str) -> float:
        """How long a service may take to end what it is doing."""
        return self.settings.drain_seconds * SHARES[service]

    def patience(self, service: str) -> float:
        """How long to wait for a service to end before it is killed."""
        return self.seconds(service) + CLOSING_SECONDS[service]

    def gateway(self) -> Program:
        told = {"host": self.settings.host, "port": self.port, "api_key": self.key}
        return self._program("gateway", "gateway", told)

    def dispatcher(self) -> Program:
        return self._program("dispatcher", "dispatcher", {"metrics_port": self._metrics_port(0)})

    def workers(self) -> list[Program]:
        return [self._worker(number) for number in range(1, self.settings.workers + 1)]

    def _worker(self, number: int) -> Program:
        name = f"worker-{number}"
        told = {
            "id": name,
            "model": json.dumps(self.models),
            "threads": self._threads(),
            "metrics_port": self._metrics_port(number),
        }
        allocator = {} if self.models == ("mock",) else ALLOCATOR
        return self._program("worker", name, told, allocator)

    def _threads(self) -> int:
        shared = max(1, (os.cpu_count() or 1) // self.settings.workers)
        return self.settings.threads or (shared if self.settings.workers > 1 else 0)

    def _metrics_port(self, number: int) -> int:
        first = self.settings.metrics_port
        return first + number if first else 0

    def _program(
        self,
        service: str,
        name: str,
        told: dict[str, object],
        allocator: dict[str, str] | None = None,
    ) -> Program:
        told = {
            "nats": self.nats,
            "log_level": self.settings.log_level,
            "drain_seconds": self.seconds(service),
            **told,
        }
        if self.settings.config:
            told["config"] = self.settings.config.resolve()
        environment = {**(allocator or {}), **_inherited(), **dict(_variables(told.items()))}
        return Program(name, (sys.executable, "-m", "millstream", service), environment)


def _inherited() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    return {**kept, "PYTHONSAFEPATH": "1"}  # a folder called `gateway` here is not our package


def _variables(told: Iterable[tuple[str, object]]) -> Iterable[tuple[str, str]]:
    return ((PREFIX + key.upper(), str(value)) for key, value in told)
