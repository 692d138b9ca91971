"""Services and commands enter a broker by files of their own, and show nobody what is in these."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from registry.models import mock_model
from registry.store import Registry
from streams.base_settings import ENV_PREFIX
from streams.connection_files import ConnectionFiles
from tests.support.accounts_server import connect
from tests.support.certificates import CertificateAuthority
from tests.support.eventually import eventually
from tests.support.operator_server import OperatorServer
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess, service_process
from tests.support.services import always

START_SECONDS = 180.0  # for four services at once on a busy machine
API_KEY = "sk-test-of-credentials-0123456789"


class GuardedBroker:
    """A server with TLS, accounts and client certificates, and the files that open it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = CertificateAuthority(folder)
        own, self._client = self._authority.issue("server"), self._authority.issue("client")
        store = folder / "operator"
        store.mkdir()
        self.server = OperatorServer(
            store,
            f'tls {{ cert_file: "{own.cert}", key_file: "{own.key}", verify: true, '
            f'ca_file: "{self._authority.file}", handshake_first: true }}',
        )
        self.url = self.server.url

    def settings(self, user: str) -> dict[str, Path]:
        """What a process with this user is told, as settings."""
        creds = self.server.write(self._folder / f"{user}.creds", self.server.issue(user))
        return {
            "nats_creds": creds,
            "nats_ca": self._authority.file,
            "nats_cert": self._client.cert,
            "nats_key": self._client.key,
        }

    def files(self, user: str) -> ConnectionFiles:
        return ConnectionFiles(
            **{name.removeprefix("nats_"): path for name, path in self.settings(user).items()}
        )

    def secrets(self) -> list[str]:
        """Lines of which none may be seen: tokens, seeds and keys."""
        files = [*self._folder.glob("*.creds"), *self._folder.glob("*.key")]
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [line for line in lines if len(line) > 40 and " " not in line]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[GuardedBroker]:
    made = GuardedBroker(tmp_path)
    yield made
    made.server.nats.kill()


def run_command(
    url: str, *words: str, settings: Mapping[str, Path]
) -> subprocess.CompletedProcess[str]:
    """A command by its flags, in a process."""
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in settings.items()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return subprocess.run(
        [sys.executable, "-m", "millstream", *words, f"--nats={url}", *flags],
        env=kept,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )


async def accepts(port: int) -> bool:
    """True once somebody listens there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def complete(port: int) -> dict[str, Any]:
    """One completion over HTTP."""
    body = json.dumps({"model": "mock", "prompt": "hello", "max_tokens": 5}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        body,
        {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def command_line(service: ServiceProcess) -> str:
    """What every user of the machine can read of a process."""
    return Path(f"/proc/{service.process.pid}/cmdline").read_text()


async def test_a_cell_serves_over_tls_with_a_user_for_each_process(
    broker: GuardedBroker, tmp_path: Path
) -> None:
    """By environment, as `millstream up` and containers tell their services."""
    async with connect(broker.url, "admin", broker.files("admin")) as admin:
        registry = await Registry.open(admin, declares=always)
        await registry.add_model(mock_model())
        await registry.close()
    port = free_port()
    own: dict[str, dict[str, object]] = {
        "admin": {"api_key": API_KEY},
        "gateway": {"port": port},
        "dispatcher": {},
        "worker": {"model": '["mock"]'},
    }
    with ExitStack() as stack:
        services = {
            name: stack.enter_context(
                service_process(
                    name, broker.url, tmp_path / f"{name}.log", **settings, **broker.settings(name)
                )
            )
            for name, settings in own.items()
        }
        await eventually(lambda: services["gateway"].has_logged("listening"), START_SECONDS)
        await eventually(lambda: accepts(port))  # a moment later
        await eventually(lambda: services["worker"].has_logged("model_ready"), START_SECONDS)
        answer = await asyncio.to_thread(complete, port)
        assert answer["usage"]["completion_tokens"] == 5
        lag = await asyncio.to_thread(
            run_command, broker.url, "lag", "--json", settings=broker.settings("operator")
        )
        assert [worker["model"] for worker in json.loads(lag.stdout)["workers"]] == ["mock"]
        shown = lag.stdout + lag.stderr + "".join(map(command_line, services.values()))
    shown += "".join(service.log.read_text() for service in services.values())
    assert [secret for secret in broker.secrets() if secret in shown] == []
    assert "eof_received" not in shown


@pytest.mark.parametrize("command", [("lag",), ("models", "list"), ("dead", "list")])
def test_a_command_without_credentials_says_what_to_give(
    broker: GuardedBroker, command: tuple[str, ...]
) -> None:
    settings = broker.settings("operator")
    creds = settings.pop("nats_creds")
    result = run_command(broker.url, *command, settings=settings)
    assert result.returncode == 1
    assert "--nats-creds" in result.stderr.splitlines()[-1]
    creds.write_text("no credentials")
    result = run_command(broker.url, *command, settings={**settings, "nats_creds": creds})
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith(f"millstream: the NATS credentials in {creds} are malformed")


def test_files_that_do_not_go_together_are_a_wrong_use(tmp_path: Path) -> None:
    """Before anything is asked of the broker."""
    result = run_command("nats://127.0.0.1:1", "lag", settings={"nats_cert": tmp_path / "a.pem"})
    assert result.returncode == 2
    assert result.stderr == "millstream: --nats-cert and --nats-key are given together or not\n"
