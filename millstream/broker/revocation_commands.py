"""The command `millstream broker revoke`."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats.aio.client import Client

from millstream.broker.settings import RevokeSettings
from millstream.broker.store_connections import explaining_foreign_keys, owner_files
from streams.accounts.rights import BrokerAccount
from streams.accounts.user_revocation import RevokedUser, UserRevocation
from streams.broker.account_claims import check_newest, push_claims
from streams.broker.reconnecting_client import ReconnectingClient

_PUSH_SECONDS = 30.0  # a server may stall for a while


async def revoke(settings: RevokeSettings, stop: asyncio.Event) -> None:
    """Cut a user off at all servers, for good; it can be repeated until all have been told.

    Its file is removed once every server that lives has taken it, or replaced with `--renew`. A
    server that is down asks the others when it is back. Raises `InvalidCellDirectory` for a user
    that was not made there, `StoresClosed` for keys of other servers, `ClaimsOutdated` for an older
    copy of the directory, and `BrokerUnavailable` if a server that lives has not taken it, which is
    written all the same.
    """
    cell = UserRevocation.open(settings.directory.expanduser())
    async with _connect_system(cell, settings) as client:
        await check_newest(client, cell.account_tokens())
        revoked = cell.revoke(settings.name, renew=settings.renew)
        told = sorted((await push_claims(client, revoked.token, _PUSH_SECONDS)).taken)
    if not settings.renew:
        revoked.file.unlink(missing_ok=True)
    _print(cell, revoked, told, settings)


@asynccontextmanager
async def _connect_system(cell: UserRevocation, settings: RevokeSettings) -> AsyncIterator[Client]:
    """A connection of a user of the servers' own account, made for this command alone."""
    name = "millstream-revoke"
    with owner_files(cell, BrokerAccount.SYSTEM, name, settings.nats_files) as files:
        connection = ReconnectingClient(settings.nats, name, files)
        with explaining_foreign_keys(cell, settings.nats):
            await connection.open()
        try:
            yield connection.client
        finally:
            await connection.close()


def _print(
    cell: UserRevocation, revoked: RevokedUser, told: list[str], settings: RevokeSettings
) -> None:
    silent = sorted(set(cell.list_servers()) - set(told))
    file = str(revoked.file) if settings.renew else None
    if settings.as_json:
        facts = {"name": revoked.name, "user": revoked.user, "account": revoked.account}
        print(json.dumps({**facts, "told": told, "silent": silent, "file": file}))
        return
    print(f"{revoked.name}: cut off at {', '.join(told)}")
    if silent:
        print(f"{', '.join(silent)}: no answer; asks the others when it is back")
    print(f"{file}: its new credentials" if file else "new credentials: `millstream broker user`")
