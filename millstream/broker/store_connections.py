"""Connections to the accounts of a cell, for whoever holds its directory of keys.

The stores have no users. A command that needs all of one makes itself a user that ends within a
day, and forgets it: no class of processes has such a right.
"""

import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from millstream.broker.backup_settings import BackupSettings
from streams.accounts.access import store_of
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.credentials_file import write_credentials
from streams.accounts.rights import STORES, BrokerAccount
from streams.broker.broker_client import Broker, connect
from streams.connection_files import ConnectionFiles
from streams.errors import BrokerMisconfigured, BrokerUnavailable

WITHOUT_ACCOUNTS = "$G"
_LIFE_SECONDS = 86_400.0  # of a user: longer than any backup takes
_IDENTITY_SECONDS = 60.0


class StoresClosed(BrokerMisconfigured):
    """No connection to the stores can be had by what was given; says what to give instead."""


@dataclass(frozen=True)
class Store:
    """A connection to an account that has streams: a store, or the only account that there is.

    `account` is its public key, `$G` for a broker without accounts. `cluster` is the name of the
    NATS cluster, empty for a single server. `name` is that of a store of a cell.
    """

    broker: Broker
    account: str
    cluster: str
    server_version: str
    name: BrokerAccount | None = None

    def owns(self, stream: str) -> bool:
        """Return True if a stream of this name belongs here; without a cell, all do."""
        return self.name is None or store_of(stream) is self.name


@asynccontextmanager
async def open_stores(settings: BackupSettings, name: str) -> AsyncIterator[Sequence[Store]]:
    """Connect to both stores of a cell by its keys, or else to this connection's own account.

    Raises `StoresClosed` for credentials or keys that open no store, `InvalidCellDirectory` for
    keys that cannot be used, and as `connect`.
    """
    async with AsyncExitStack() as stack:
        if settings.broker_keys is None:
            connection = connect(settings.nats, name, settings.nats_files)
            broker = await stack.enter_async_context(connection)
            _check_has_streams(broker)
            yield [await _identify(broker, None)]
            return
        cell, stores = CellDirectory.open(settings.broker_keys.expanduser()), []
        for account in STORES:
            files = stack.enter_context(owner_files(cell, account, name, settings.nats_files))
            with explaining_foreign_keys(cell, settings.nats):
                connection = connect(settings.nats, name, files)
                broker = await stack.enter_async_context(connection)
            stores.append(await _identify(broker, account))
        yield stores


@contextmanager
def owner_files(
    cell: CellDirectory, account: BrokerAccount, name: str, files: ConnectionFiles
) -> Iterator[ConnectionFiles]:
    """Files of a connection by which it may do all that an account can, until the block ends.

    `files` say how the servers are known. Raises `InvalidCellDirectory`.
    """
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        creds = Path(folder) / "user.creds"
        write_credentials(creds, cell.sign_owner(account, name, _LIFE_SECONDS))
        yield replace(files, creds=creds, nkey=None)


@contextmanager
def explaining_foreign_keys(cell: CellDirectory, url: str) -> Iterator[None]:
    """Raise `StoresClosed` where a server does not let in whom the cell's keys have signed."""
    try:
        yield
    except BrokerUnavailable as error:
        if "authorization violation" not in str(error).lower():
            raise
        raise StoresClosed(
            f"NATS at {url} lets nobody in by the keys in {cell.path}: name the directory that "
            "`millstream broker init` made for these servers, as it is now (after a rotation, "
            "older copies of it sign nothing that they know)"
        ) from error


def _check_has_streams(broker: Broker) -> None:
    if broker.has_accounts:
        raise StoresClosed(
            "these are credentials of a process, and no process may copy a store: name the "
            "directory of the cell's keys with --broker-keys (`broker init` made it; that of "
            "`millstream up` is `broker` in its data directory)"
        )


async def _identify(broker: Broker, name: BrokerAccount | None) -> Store:
    """Ask the server which account a connection is in; raises `BrokerUnavailable`."""
    answer = await broker.request("$SYS.REQ.USER.INFO", seconds=_IDENTITY_SECONDS)
    if answer is None:
        raise BrokerUnavailable("the server does not say which account this connection is in")
    told = orjson.loads(answer)
    server, data = told.get("server", {}), told.get("data", {})
    return Store(
        broker,
        str(data.get("account", WITHOUT_ACCOUNTS)),
        str(server.get("cluster", "")),
        str(server.get("ver", "")),
        name,
    )
