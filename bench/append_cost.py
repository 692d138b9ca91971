"""Measures the broker's CPU for an append to a token log: without accounts, and with them.

With accounts a worker's append is imported by its account; that of a user inside the store's own
account, which no cell has, shows what the import costs. Three servers are loaded by turns.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from bench import reporting
from bench.reporting import Figure, Run
from millstream.bench.cpu_usage import MeasuredProcess
from streams.accounts.access import UserClass
from streams.accounts.cell_directory import SIGNING, CellDirectory
from streams.accounts.claims import EVERYTHING
from streams.accounts.credentials_file import write_credentials
from streams.accounts.minting import NewUser
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.accounts.rights import BrokerAccount
from streams.accounts.server_configuration import embedded_configuration
from streams.broker import declaration
from streams.broker.broker_client import connect
from streams.connection_files import NO_FILES, ConnectionFiles
from streams.topology import Scale
from tests.support.nats_server import NatsServer

APPENDS, IN_FLIGHT, LOGS = 20_000, 100, 64
PLAIN, IMPORTED, INSIDE = "plain", "imported", "inside"
FIGURES = (
    Figure(f"{PLAIN}_us", "without accounts, µs per append"),
    Figure(f"{IMPORTED}_us", "imported by a worker's account, µs per append"),
    Figure(f"{INSIDE}_us", "by a user inside the store's account, µs per append"),
)


def measure(runs: int, seconds: float) -> None:
    """Append in `runs` rounds to each server, and publish; `seconds` has no effect."""
    with tempfile.TemporaryDirectory() as home, ExitStack() as running:
        servers = {
            name: _start(running, name, Path(home) / name) for name in (PLAIN, IMPORTED, INSIDE)
        }
        found = [asyncio.run(_round(servers)) for _ in range(runs)]
    setting = {"appends": APPENDS, "in_flight": IN_FLIGHT, "logs": LOGS, "bytes": 64}
    reporting.publish("append", setting, FIGURES, found)


@dataclass(frozen=True)
class Server:
    """A running nats-server with all streams, and the credentials of who appends."""

    nats: NatsServer
    writer: ConnectionFiles


def _start(running: ExitStack, name: str, home: Path) -> Server:
    home.mkdir()
    keys = CellDirectory.create(home / "keys", shards=1)
    text = embedded_configuration(keys.accounts_block(), home / "accounts")
    if name == PLAIN:
        text = (files("streams") / "nats" / "embedded.conf").read_text()
    configuration = home / "nats.conf"
    configuration.write_text(text)
    told = {"NATS_PORT": "-1", "NATS_STORE_DIR": str(home / "nats")}
    server = NatsServer(home, configuration=configuration, environment={**os.environ, **told})
    running.callback(server.kill)
    admin, writer = NO_FILES, NO_FILES
    if name != PLAIN:
        admin = ConnectionFiles(creds=keys.add_user("admin", UserClass.ADMIN))
        writer = ConnectionFiles(creds=keys.add_user("worker", UserClass.WORKER))
    if name == INSIDE:
        writer = ConnectionFiles(creds=_add_insider(keys))
    asyncio.run(_declare(server.url, admin))
    return Server(server, writer)


def _add_insider(keys: CellDirectory) -> Path:
    """A user of the account that stores the logs, as no process is one."""
    seed = (keys.path / SIGNING / f"{BrokerAccount.WORK}.seed").read_text()
    account = keys.read().accounts[BrokerAccount.WORK].public
    user = NewUser(UserClass.WORKER, "insider", KeyPair.generate(KeyKind.USER))
    file = keys.path / "insider.creds"
    made = user.sign(account, KeyPair.from_seed(seed), time.time(), permissions=EVERYTHING)
    write_credentials(file, made)
    return file


async def _declare(url: str, admin: ConnectionFiles) -> None:
    async with connect(url, "bench", admin) as broker:
        await declaration.declare(broker, Scale(), max_queued=1)


async def _round(servers: Mapping[str, Server]) -> Run:
    return {f"{name}_us": await _append(server) for name, server in servers.items()}


async def _append(server: Server) -> float:
    """The server's CPU for one append, in µs."""
    process = MeasuredProcess("nats", server.nats.process.pid)
    async with connect(server.nats.url, "bench", server.writer) as broker:

        async def write(first: int) -> None:
            for number in range(first, APPENDS, IN_FLIGHT):
                await broker.store(f"infer.token.0.bench.gw.{number % LOGS}", bytes(64))

        before = process.cpu_seconds() or 0.0
        await asyncio.gather(*(write(first) for first in range(IN_FLIGHT)))
        return ((process.cpu_seconds() or 0.0) - before) / APPENDS * 1e6
