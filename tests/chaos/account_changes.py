"""Changes of a run's accounts and users while all goes on, by an operator or a thief of his."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats.aio.client import Client

from streams.broker.account_claims import push_claims
from streams.broker.reconnecting_client import ReconnectingClient
from streams.connection_files import ConnectionFiles
from tests.chaos.cluster import SYSTEM, Cluster
from tests.support.accounts_server import observer_token
from tests.support.eventually import eventually

PUSH_SECONDS = 30.0
RENEW_SECONDS = 60.0  # until all processes have taken up their new files


async def rotate_keys(cluster: Cluster) -> None:
    """Replace all signing keys and all users' credentials; nothing of the old ones is left."""
    await _run_rotate(cluster, "accounts")
    async with _connect_system(cluster) as client:  # the command knows no observers
        await push_claims(client, observer_token(cluster.cell), PUSH_SECONDS)
    await _run_rotate(cluster, "users")
    await cluster.issue_credentials()
    await eventually(lambda: _run_rotate(cluster, "accounts", "--finish"), RENEW_SECONDS)


async def _run_rotate(cluster: Cluster, what: str, *words: str) -> bool:
    """One step of `millstream broker rotate`; whether it was done."""
    returncode, told = await _run_broker(cluster, "rotate", "--what", what, *words)
    assert words or not returncode, told
    return not returncode


async def revoke_user(cluster: Cluster, name: str) -> None:
    """A process's credentials are revoked on all brokers, which cut it off."""
    returncode, told = await _run_broker(cluster, "revoke", name)
    assert not returncode, told


async def _run_broker(cluster: Cluster, command: str, *words: str) -> tuple[int, str]:
    """A command of `millstream broker` on the cluster's keys; its exit status and errors."""
    given = ("broker", command, str(cluster.cell.path), *words, "--nats", cluster.brokers.direct)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millstream", *given),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    return process.returncode or 0, told.decode()


@asynccontextmanager
async def _connect_system(cluster: Cluster) -> AsyncIterator[Client]:
    files = ConnectionFiles(creds=cluster.cell.user_file(SYSTEM))
    connection = ReconnectingClient(cluster.brokers.direct, "chaos", files)
    await connection.open()
    try:
        yield connection.client
    finally:
        await connection.close()
