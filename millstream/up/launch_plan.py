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
from millstream.settings_loader import ENV_PREFIX
from millstream.up import nats_server
from millstream.up.child_process import Program

# In the order in which they stop: a service's part of the time to drain, and the seconds that it
# may take beyond, to say goodbye (a gateway to every open socket), before it is killed.
DRAIN_SHARES = {"gateway": 0.4, "worker": 0.3, "dispatcher": 0.15, "nats": 0.15}
CLOSING_SECONDS = {"gateway": 2.5, "worker": 1.0, "dispatcher": 0.3, "nats": 0.2}

# glibc keeps freed memory instead of giving it back: engines allocate the same blocks every step.
ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
_NOT_PASSED_ON = {ENV_PREFIX + key for key in ("ID", "MODEL", "API_KEY")}


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that the children need to know, decided once."""

    settings: UpSettings
    port: int
    nats_port: int
    api_key: str
    models: tuple[str, ...]

    @property
    def nats_url(self) -> str:
        return nats_server.make_url(self.nats_port)

    @property
    def gateway_url(self) -> str:
        host = self.settings.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}"

    def drain_seconds(self, service: str) -> float:
        """How long a service may take to end what it is doing."""
        return self.settings.drain_seconds * DRAIN_SHARES[service]

    def kill_after_seconds(self, service: str) -> float:
        """How long to wait for a service to end before it is killed."""
        return self.drain_seconds(service) + CLOSING_SECONDS[service]

    def gateway_program(self) -> Program:
        told = {"host": self.settings.host, "port": self.port, "api_key": self.api_key}
        return self._make_program("gateway", "gateway", told)

    def dispatcher_program(self) -> Program:
        return self._make_program(
            "dispatcher", "dispatcher", {"metrics_port": self._metrics_port(0)}
        )

    def worker_programs(self) -> list[Program]:
        return [self._make_worker_program(number) for number in range(1, self.settings.workers + 1)]

    def _make_worker_program(self, number: int) -> Program:
        name = f"worker-{number}"
        told = {
            "id": name,
            "model": json.dumps(self.models),
            "threads": self._worker_threads(),
            "metrics_port": self._metrics_port(number),
        }
        allocator = {} if self.models == ("mock",) else ALLOCATOR_ENVIRONMENT
        return self._make_program("worker", name, told, allocator)

    def _worker_threads(self) -> int:
        shared = max(1, (os.cpu_count() or 1) // self.settings.workers)
        return self.settings.threads or (shared if self.settings.workers > 1 else 0)

    def _metrics_port(self, number: int) -> int:
        first = self.settings.metrics_port
        return first + number if first else 0

    def _make_program(
        self,
        service: str,
        name: str,
        told: dict[str, object],
        allocator: dict[str, str] | None = None,
    ) -> Program:
        told = {
            "nats": self.nats_url,
            "log_level": self.settings.log_level,
            "drain_seconds": self.drain_seconds(service),
            **told,
        }
        if self.settings.config:
            told["config"] = self.settings.config.resolve()
        environment = {
            **(allocator or {}),
            **_inherited_environment(),
            **dict(_to_variables(told.items())),
        }
        return Program(name, (sys.executable, "-m", "millstream", service), environment)


def _inherited_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    return {**kept, "PYTHONSAFEPATH": "1"}  # a folder called `gateway` here is not our package


def _to_variables(told: Iterable[tuple[str, object]]) -> Iterable[tuple[str, str]]:
    return ((ENV_PREFIX + key.upper(), str(value)) for key, value in told)
