"""Changes of a run's accounts and users while all goes on, by an operator or a thief of his."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from nats.aio.client import Client

from streams.accounts.access import ACCOUNT_OF, UserClass
from streams.accounts.claims import next_issued_at
from streams.accounts.credentials_file import read_credentials
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
    command = ("broker", "rotate", str(cluster.cell.path), "--nats", cluster.brokers.direct)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millstream", *command, "--what", what, *words),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    assert words or not process.returncode, told.decode()
    return not process.returncode


async def revoke_user(cluster: Cluster, name: str) -> None:
    """A process's credentials are revoked on all brokers, which cut it off."""
    user_class = UserClass(name.partition("-")[0])
    user = read_credentials(cluster.cell.user_file(name), now=0).user
    mint, account = cluster.cell.mint(), ACCOUNT_OF[user_class]
    state = mint.states[account]
    issued_at = next_issued_at(state.issued_at, time.time())
    revoked = replace(state, issued_at=issued_at, revocations={user: issued_at})
    mint = replace(mint, states={**mint.states, account: revoked})
    async with _connect_system(cluster) as client:
        await push_claims(client, mint.account_token(account), PUSH_SECONDS)


@asynccontextmanager
async def _connect_system(cluster: Cluster) -> AsyncIterator[Client]:
    files = ConnectionFiles(creds=cluster.cell.user_file(SYSTEM))
    connection = ReconnectingClient(cluster.brokers.direct, "chaos", files)
    await connection.open()
    try:
        yield connection.client
    finally:
        await connection.close()
