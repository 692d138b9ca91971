"""The processes that `millstream up` runs, each with its command, environment and time to drain.

Settings and the API key are passed in the environment, since every user of the machine can read a
command line; that names only the service.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from millstream.up import nats_server
from millstream.up.broker_accounts import BrokerAccounts
from millstream.up.child_process import Program
from millstream.up.data_directory import KEY_PEPPER_FILE
from millstream.up.settings import UpSettings
from streams.accounts.access import UserClass
from streams.base_settings import CONNECTION_KEYS, ENV_PREFIX, UPSTREAM_PREFIX, cache_directory
from streams.records.fleet.machine_list import Machine

# In the order in which services are stopped: each one's share of the drain time, and the seconds it
# may take beyond that to close connections (a gateway's: every open socket) before it is killed.
DRAIN_SHARES = {
    "gateway": 0.4,
    "fleet": 0.0,  # it has nothing to finish
    "worker": 0.25,
    "dispatcher": 0.1,
    "jobs": 0.05,
    "ledger": 0.05,
    "admin": 0.05,
    "nats": 0.1,
}
CLOSING_SECONDS = {
    "gateway": 2.2,
    "fleet": 0.2,
    "worker": 1.0,
    "dispatcher": 0.3,
    "jobs": 0.3,
    "ledger": 0.4,
    "admin": 0.3,
    "nats": 0.2,
}
LEDGER_KEPT = "1h"  # of what is exported, for `why` and for new leaders

# Let glibc keep freed memory instead of returning it: engines allocate equal blocks in every step.
ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
ADMIN_HOST = nats_server.HOST
_NOT_PASSED_ON = {ENV_PREFIX + key for key in ("ID", "MODEL", "API_KEY", "ADMIN_KEY")}
_NOT_PASSED_ON |= {ENV_PREFIX + key.upper() for key in CONNECTION_KEYS}  # of another cell


@dataclass(frozen=True)
class WorkerUser:
    """The NATS user of a worker: its type of machine, if any, and the models it has rights for."""

    type: str
    models: tuple[str, ...]


@dataclass(frozen=True)
class LaunchPlan:
    """The settings, ports, API key and model names with which one `millstream up` starts services.

    Its methods return the program (command line and environment) of each child process and the time
    that each service gets to stop; they start nothing. `workers` has the users of the workers whose
    programs were made, by name.
    """

    settings: UpSettings
    port: int
    nats_port: int
    admin_port: int
    api_key: str
    models: Mapping[str, str]  # the source of each, by name
    accounts: BrokerAccounts
    gateway_fd: int  # of the socket that all gateways listen on
    workers: dict[str, WorkerUser] = field(default_factory=dict)

    @property
    def nats_url(self) -> str:
        """The URL of the embedded nats-server for NATS clients on this machine."""
        return nats_server.make_url(self.nats_port)

    @property
    def gateway_url(self) -> str:
        """The gateway's URL for clients on this machine; on 127.0.0.1 if it listens everywhere."""
        host = self.settings.host
        everywhere = host in ("0.0.0.0", "::", "")  # nosec B104
        shown = "127.0.0.1" if everywhere else host
        scheme = "https" if self.settings.tls_cert else "http"
        return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{self.port}"

    @property
    def admin_url(self) -> str:
        """The URL of the admin service for clients on this machine."""
        return f"http://{ADMIN_HOST}:{self.admin_port}"

    def drain_seconds(self, service: str) -> float:
        """Return how many seconds a service may take to finish its requests after its SIGTERM.

        `service` is a key of `DRAIN_SHARES`, such as `worker`; each service gets a fixed share of
        the setting `drain_seconds`.
        """
        return self.settings.drain_seconds * DRAIN_SHARES[service]

    def kill_after_seconds(self, service: str) -> float:
        """Return how many seconds after its SIGTERM a service that still runs is to be killed.

        They are its `drain_seconds` plus 0.2 to 2.5 s for closing connections, by service.
        """
        return self.drain_seconds(service) + CLOSING_SECONDS[service]

    def admin_program(self) -> Program:
        """Return the program of the admin service, the only one that gets the API key.

        The key is that of the tenant `default` and opens the admin API, too.
        """
        settings = {
            "admin_host": ADMIN_HOST,
            "admin_port": self.admin_port,
            "admin_key": self.api_key,
            "api_key": self.api_key,
            "key_pepper_file": self._key_pepper_file,
            "broker_keys": self.accounts.cell.path.resolve(),
            "replace_tenants": True,
            "metrics_port": self._metrics_port(self.settings.workers + 2),
        }
        if self.settings.ledger_dir:
            settings["ledger_days"] = 0
        creds = self.accounts.file(UserClass.ADMIN)
        return self._make_program("admin", "admin", settings, creds)

    @property
    def _key_pepper_file(self) -> Path:
        return self.settings.data_dir.expanduser().resolve() / KEY_PEPPER_FILE

    @property
    def gateway_names(self) -> tuple[str, ...]:
        """The names of all gateways in logs: `gateway`, or `gateway-N` if there are several."""
        count = self.settings.gateways
        if count == 1:
            return ("gateway",)
        return tuple(f"gateway-{number}" for number in range(1, count + 1))

    def gateway_programs(self) -> list[Program]:
        """Return the programs of all gateways, which listen on one socket.

        Each connection goes to the first that accepts it: one that is dead or hangs gets none.
        """
        return [
            replace(self._make_gateway_program(index, name), inherited_fds=(self.gateway_fd,))
            for index, name in enumerate(self.gateway_names)
        ]

    def _make_gateway_program(self, index: int, name: str) -> Program:
        own_port = self.settings.workers + (index + 4 if index else 1)  # after all other services'
        settings = {
            "host": self.settings.host,
            "port": self.port,
            "fd": self.gateway_fd,
            "key_pepper_file": self._key_pepper_file,
            "metrics_port": self._metrics_port(own_port),
            "public_metrics": self.settings.public_metrics,
            **self._webhook_networks(),
            **self._tls_files(),
        }
        creds = self.accounts.file(UserClass.GATEWAY)
        return self._make_program("gateway", name, settings, creds)

    def _tls_files(self) -> dict[str, object]:
        names = ("tls_cert", "tls_key", "tls_client_ca")
        files = {name: getattr(self.settings, name) for name in names}
        return {name: file.expanduser().resolve() for name, file in files.items() if file}

    def dispatcher_program(self) -> Program:
        """Return the dispatcher's program, which serves its metrics on the setting `metrics_port`.

        With the port 0 it serves no metrics.
        """
        creds = self.accounts.file(UserClass.DISPATCHER)
        settings = {"metrics_port": self._metrics_port(0)}
        return self._make_program("dispatcher", "dispatcher", settings, creds)

    def jobs_program(self) -> Program:
        """Return the program of the jobs service."""
        port = self._metrics_port(self.settings.workers + 3)
        settings = {"metrics_port": port, **self._webhook_networks()}
        creds = self.accounts.file(UserClass.JOBS)
        return self._make_program("jobs", "jobs", settings, creds)

    def fleet_programs(self) -> list[Program]:
        """Return the program of the fleet service, in a list; an empty one without `[fleet]`."""
        if self.settings.fleet is None:
            return []
        settings = {"metrics_port": self._metrics_port(self.settings.workers + 4)}
        creds = self.accounts.file(UserClass.FLEET)
        return [self._make_program("fleet", "fleet", settings, creds)]

    def _webhook_networks(self) -> dict[str, str]:
        return {"webhook_network": json.dumps([str(n) for n in self.settings.webhook_network])}

    def ledger_programs(self) -> list[Program]:
        """Return the program that exports the ledger, in a list; an empty one unless it is set."""
        if self.settings.ledger_dir is None:
            return []
        directory = str(self.settings.ledger_dir.expanduser().resolve())
        words = ("ledger", "export", directory, "--remove-after", LEDGER_KEPT)
        creds = self.accounts.file(UserClass.LEDGER)
        return [self._make_program("ledger", "ledger-export", {}, creds, words=words)]

    def worker_programs(self) -> list[Program]:
        """Return the programs of all workers, one for each process that the settings ask for.

        With a `[fleet]` table there are none: see `machine_program`.

        Each engine gets as many CPU threads as the setting `threads` says, or by default an equal
        part of the machine's cores. Worker N serves its metrics on `metrics_port` + N, or not if
        that setting is 0.
        """
        if self.settings.fleet:
            return []
        return [self._make_worker_program(number) for number in range(1, self.settings.workers + 1)]

    def _make_worker_program(self, number: int) -> Program:
        settings = {
            **self._worker_costs(),
            "threads": self._worker_threads(),
            "metrics_port": self._metrics_port(number),
        }
        return self._make_serving_program(f"worker-{number}", list(self.models), settings)

    def machine_program(self, name: str, machine: Machine) -> Program:
        """Return the program of a machine's worker, which serves the machine's model alone.

        The type of the machine must be in the table `[fleet]`. It serves no metrics.
        """
        assert self.settings.fleet is not None
        table = self.settings.fleet.types[machine.type]
        drain_seconds = self.drain_seconds("worker")
        if table.spot:
            closing = CLOSING_SECONDS["worker"]
            drain_seconds = max(0.0, min(drain_seconds, table.notice_seconds - closing))
        settings = {
            "type": machine.type,
            "price_per_hour": table.to_record(machine.type).hour_price,
            "price_currency": table.currency,
            "drain_seconds": drain_seconds,
            **table.worker_settings,
        }
        return self._make_serving_program(name, [machine.model], settings)

    def _make_serving_program(
        self, name: str, models: list[str], own_settings: Mapping[str, object]
    ) -> Program:
        settings = {
            "id": name,
            "model": json.dumps(models),
            **self._worker_destinations(),
            **own_settings,
        }
        allocator = {} if models == ["mock"] else ALLOCATOR_ENVIRONMENT
        self.workers[name] = WorkerUser(str(own_settings.get("type", "")), tuple(models))
        creds = self.accounts.add_worker(name, models)
        return self._make_program("worker", name, settings, creds, allocator)

    def _worker_destinations(self) -> dict[str, str]:
        """Settings of a worker's policy on records, with the models that `up` itself names."""
        settings = self.settings
        roots = [str(root.expanduser()) for root in settings.model_root]
        if roots:
            sources = map(Path, self.models.values())
            roots += [str(source.resolve()) for source in sources if source.is_dir()]
            roots.append(str(cache_directory()))
        given = {
            "upstream_host": settings.upstream_host,
            "upstream_key_variable": settings.upstream_key_variable,
            "model_root": roots,
        }
        return {key: json.dumps(values) for key, values in given.items()}

    def _worker_costs(self) -> dict[str, object]:
        settings = self.settings
        costs = {"type": settings.worker_type, "price_per_hour": settings.worker_price_per_hour}
        return {name: value for name, value in costs.items() if value is not None}

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
        own_settings: Mapping[str, object],
        creds: Path,
        allocator: dict[str, str] | None = None,
        words: tuple[str, ...] = (),
    ) -> Program:
        settings = {
            "nats": self.nats_url,
            "nats_creds": creds,
            "shards": self.settings.shards,
            "log_level": self.settings.log_level,
            "drain_seconds": self.drain_seconds(service),
            "metrics_host": self.settings.metrics_host,
            **own_settings,
        }
        if self.settings.config:
            settings["config"] = self.settings.config.resolve()
        environment = {
            **(allocator or {}),
            **_inherited_environment(service),
            **dict(_to_variables(settings.items())),
        }
        command = (sys.executable, "-m", "millstream", *(words or (service,)))
        return Program(name, command, environment)


def _inherited_environment(service: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    if service != "worker":  # which alone calls other servers, with their API keys
        kept = {name: value for name, value in kept.items() if not name.startswith(UPSTREAM_PREFIX)}
    # Without the safe path a folder called `gateway` in the working directory would be imported.
    return {**kept, "PYTHONSAFEPATH": "1"}


def _to_variables(settings: Iterable[tuple[str, object]]) -> Iterable[tuple[str, str]]:
    return ((ENV_PREFIX + key.upper(), str(value)) for key, value in settings)
