"""Servers with certificates of `broker init --tls`: all connections are encrypted, and known."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streams.accounts.access import UserClass
from streams.broker import reconnecting_client
from streams.broker.account_claims import list_servers, push_claims
from streams.broker.reconnecting_client import ReconnectingClient
from streams.certificate_files import AUTHORITY, certificate_file
from streams.connection_files import ConnectionFiles
from streams.errors import BrokerUnavailable
from tests.support.accounts_cell import AccountsCell
from tests.support.eventually import eventually


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[AccountsCell]:
    """Three servers that know each other by their certificates."""
    made = AccountsCell(tmp_path, 3, encrypts=True)
    try:
        made.start()
        yield made
    finally:
        made.close()


def files(cell: AccountsCell, creds: Path) -> ConnectionFiles:
    assert cell.certificates
    return ConnectionFiles(creds=creds, ca=certificate_file(cell.certificates, AUTHORITY))


async def test_servers_and_users_with_credentials_meet_over_tls(cell: AccountsCell) -> None:
    """A tenant that is made at one is let in at all of them."""
    system = files(cell, cell.directory.add_user("system", UserClass.SYSTEM))
    creds = cell.directory.path / "users/acme.creds"
    broker = ReconnectingClient(cell.nodes[0].url, "system", system)
    await broker.open()
    try:

        async def all_are_there() -> bool:
            return len(await list_servers(broker.client)) == 3

        await eventually(all_are_there)
        token = cell.directory.add_tenant("acme")
        assert (await push_claims(broker.client, token)).taken == {"n0", "n1", "n2"}
    finally:
        await broker.close()
    creds.write_text(cell.directory.tenant_credentials("acme").text())
    for node in cell.nodes:
        producer = ReconnectingClient(node.url, "producer", files(cell, creds))
        await producer.open()
        assert await producer.is_responsive(60)
        await producer.close()


async def test_who_does_not_begin_with_tls_is_not_let_in(
    cell: AccountsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good credentials make no difference: they are not even sent."""
    monkeypatch.setattr(reconnecting_client, "OPEN_SECONDS", 2.0)
    creds = cell.directory.add_user("system", UserClass.SYSTEM)
    url = cell.nodes[0].url.replace("tls://", "nats://")
    plain = ReconnectingClient(url, "test", ConnectionFiles(creds=creds))
    with pytest.raises(BrokerUnavailable, match="TLS"), capture_logs():
        await plain.open()
