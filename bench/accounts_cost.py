"""Measures what accounts cost, and TLS to the broker beside them: three cells, loaded by turns.

Each round loads a cell without accounts, one with accounts, and one with accounts and TLS, which
all run all the time, and compares within the round. CPU per token is of 64 streams of 64 tokens
over HTTP, 6 ms apart; time to first token is beyond the mock's own, one request at a time.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from bench import bench_command, reporting
from bench.reporting import Figure, Run
from registry.models import mock_model
from registry.store import Registry
from streams.accounts.access import UserClass
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.server_configuration import embedded_configuration
from streams.broker.broker_client import connect
from streams.connection_files import NO_FILES, ConnectionFiles
from tests.support.certificates import CertificateAuthority
from tests.support.eventually import eventually
from tests.support.millstream_up import KEY
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess

TTFT_MS, ITL_MS = 20, 6
STREAMS, TOKENS, REQUESTS = 64, 64, 100
PLAIN, ACCOUNTS, TLS = "plain", "accounts", "tls"
SETUPS = (PLAIN, ACCOUNTS, TLS)
READY = {  # log events of services, in the order of their start
    "admin": "admin_listening",
    "dispatcher": "members_changed",
    "gateway": "listening",
    "worker": "model_ready",
}
NATS, TTFT = "nats", "ttft"
COMPARED = ("gateway", "dispatcher", "worker", NATS, TTFT)  # an idle admin service has no percents
_WORDS = ("--protocol", "sse")


def _figures() -> Iterator[Figure]:
    for name in COMPARED:
        goal = "" if name == NATS else "≤ 5"
        what = (
            f"{name}, CPU, µs per token" if name != TTFT else "added time to first token, p50, ms"
        )
        yield Figure(f"{name}_{PLAIN}", f"{what}, without accounts")
        yield Figure(f"{name}_{ACCOUNTS}_percent", "… with accounts, % more", goal)
        yield Figure(f"{name}_{TLS}_percent", "… and with TLS, % more than without accounts")
    for setup in SETUPS:
        yield Figure(f"admin_{setup}", f"admin, CPU, µs per token, {setup}")


def measure(runs: int, seconds: float) -> None:
    """Compare in `runs` rounds, with `seconds` of load for each cell, and publish."""
    setting = {
        "mock_ttft_ms": TTFT_MS,
        "mock_itl_ms": ITL_MS,
        "relay": f"{STREAMS} streams of {TOKENS} tokens over HTTP, {seconds} s",
        "first_token": f"1 stream, {REQUESTS} requests",
        "cells": "three at once, loaded by turns",
    }
    with tempfile.TemporaryDirectory() as home, ExitStack() as running:
        cells = [running.enter_context(_cell(name, Path(home) / name)) for name in SETUPS]
        for cell in cells:
            cell.load(seconds)  # what is done once is no cost of a token
        found = [_round(cells, number, seconds) for number in range(runs)]
    reporting.publish("accounts", setting, list(_figures()), found)


@dataclass(frozen=True)
class Cell:
    """A running system of its own: its gateway's address, and its processes' ids by name."""

    setup: str
    url: str
    pids: dict[str, int]

    def load(self, seconds: float) -> dict[str, float]:
        """CPU of each process in µs per token, and the added time to first token in ms."""
        many = ("--concurrency", str(STREAMS), "--output-tokens", str(TOKENS))
        report = bench_command.run_bench(
            self.url, self.pids, *_WORDS, *many, "--duration", str(seconds)
        )
        one = ("--concurrency", "1", "--requests", str(REQUESTS), "--output-tokens", "2")
        alone = bench_command.run_bench(self.url, self.pids, *_WORDS, *one)
        return {
            **{name: report["cpu_us_per_token"][name] for name in self.pids},
            TTFT: alone["latencies_ms"][TTFT]["p50"] - TTFT_MS,
        }


def _round(cells: Sequence[Cell], number: int, seconds: float) -> Run:
    """Load each cell once; which one is the first changes from round to round."""
    turn = number % len(cells)
    found = {cell.setup: cell.load(seconds) for cell in (*cells[turn:], *cells[:turn])}
    plain = found[PLAIN]
    admins = {f"admin_{setup}": each["admin"] for setup, each in found.items()}
    values = {f"{name}_{PLAIN}": plain[name] for name in COMPARED}
    percents = {
        f"{name}_{setup}_percent": 100 * (found[setup][name] / plain[name] - 1)
        for name in COMPARED
        for setup in (ACCOUNTS, TLS)
    }
    return {**admins, **values, **percents}


@contextmanager
def _cell(setup: str, home: Path) -> Iterator[Cell]:
    """A cell with the embedded server's settings, ready to serve the mock model."""
    home.mkdir()
    keys = CellDirectory.create(home / "keys", shards=1)
    authority = CertificateAuthority(home)
    server = NatsServer(
        home,
        configuration=_write_configuration(setup, home, keys, authority),
        environment={**os.environ, "NATS_PORT": "-1", "NATS_STORE_DIR": str(home / "nats")},
    )
    with ExitStack() as running:
        running.callback(server.kill)
        services, port = dict[str, ServiceProcess](), free_port()
        for name in READY:
            told = _files(setup, name, keys, authority)
            settings = {"nats": server.url, "id": name, "config": _write_settings(home)}
            settings |= {"nats_creds": told.creds} if told.creds else {}
            settings |= {"nats_ca": told.ca} if told.ca else {}
            settings |= {"port": port} if name == "gateway" else {}
            settings |= {"model": '["mock"]'} if name == "worker" else {}
            services[name] = ServiceProcess(name, home / f"{name}.log", settings)
            running.callback(services[name].kill)
            if name == "admin":
                asyncio.run(_wait_until_ready({name: services[name]}))
                asyncio.run(_register(server.url, _files(setup, "admin", keys, authority)))
        asyncio.run(_wait_until_ready(services))
        pids = {name: service.process.pid for name, service in services.items()}
        yield Cell(setup, f"http://127.0.0.1:{port}", {**pids, NATS: server.process.pid})


def _write_configuration(
    setup: str, home: Path, keys: CellDirectory, authority: CertificateAuthority
) -> Path:
    if setup == PLAIN:
        text = (files("streams") / "nats" / "embedded.conf").read_text()
    else:
        text = embedded_configuration(keys.accounts_block(), home / "accounts")
    if setup == TLS:
        pair = authority.issue("broker")
        text += (
            f'tls {{ cert_file: "{pair.cert}", key_file: "{pair.key}", handshake_first: true }}\n'
        )
    configuration = home / "nats.conf"
    configuration.write_text(text)
    return configuration


def _write_settings(home: Path) -> Path:
    settings = home / "millstream.toml"
    settings.write_text(f'[tenants.bench]\nkeys = ["{KEY}"]\n')
    return settings


def _files(
    setup: str, name: str, keys: CellDirectory, authority: CertificateAuthority
) -> ConnectionFiles:
    if setup == PLAIN:
        return NO_FILES
    ca = authority.file if setup == TLS else None
    return ConnectionFiles(creds=keys.add_user(name, UserClass(name)), ca=ca)


async def _register(url: str, told: ConnectionFiles) -> None:
    async with connect(url, "bench", told) as broker:
        registry = await Registry.open(broker)
        await registry.add_model(mock_model(ttft_ms=TTFT_MS, itl_ms=ITL_MS, sequences=STREAMS))
        await registry.close()


async def _wait_until_ready(services: dict[str, ServiceProcess]) -> None:
    await eventually(lambda: all(s.has_logged(READY[name]) for name, s in services.items()))
