"""The commands `millstream broker init` and `user`."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millstream.broker.settings import InitSettings, UserSettings
from millstream.tls.commands import CertificatesNotMade
from streams.accounts.access import ACCOUNT_OF, UserClass
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.credentials_file import read_credentials
from streams.accounts.rights import Pins
from streams.accounts.server_configuration import NODE_TLS, node_configuration, with_tls
from streams.certificate_files import AUTHORITY, certificate_file, write_server

TLS = "tls"  # the folder of certificates in a directory of keys


async def init(settings: InitSettings, stop: asyncio.Event) -> None:
    """Make a cell's keys, accounts and users, and the configuration of its NATS servers.

    Keys that are there stay; claims, configurations and certificates are made anew. Raises
    `InvalidCellDirectory` for keys that cannot be used, `CertificatesNotMade` for an authority.
    """
    cell = CellDirectory.create(settings.directory, settings.shards)
    block = cell.accounts_block()
    nodes = {
        name: cell.write_node(
            name, node_configuration(block, name, settings.nodes, is_monitored=True)
        )
        for name in settings.nodes
    }
    ca = None
    if settings.tls or certificate_file(settings.directory / TLS, AUTHORITY).exists():
        ca = _encrypt(cell, settings)
    users = {user_class: cell.add_user(user_class, user_class, Pins()) for user_class in ACCOUNT_OF}
    if settings.as_json:
        accounts = {name: state.public for name, state in cell.read().accounts.items()}
        made = {"accounts": accounts, "nodes": nodes, "users": users, "ca": ca}
        print(json.dumps(_as_text(made)))
        return
    for name, file in nodes.items():
        print(f"{name}: nats-server -c {file}")
    for user_class, file in users.items():
        print(f"{user_class}: {file}")
    if ca:
        print(f"{ca}: for clients, --nats-ca; what lies beside it goes to the servers' {NODE_TLS}")
    print(
        f"{settings.directory / 'keys/identity'}: take these seeds away, and keep them where "
        "nothing is lost"
    )


def _encrypt(cell: CellDirectory, settings: InitSettings) -> Path:
    """Make the servers' certificates, and configurations with TLS; return the authority's."""
    directory, now = cell.path / TLS, datetime.now(UTC)
    try:
        for name in settings.nodes:
            write_server(directory, name, (name,), now)
    except (OSError, ValueError) as error:
        raise CertificatesNotMade(f"cannot make certificates in {directory}: {error}") from error
    for name in settings.nodes:
        configuration = (cell.path / "nodes" / f"{name}.conf").read_text()
        cell.write_node(name, with_tls(configuration, name))
    return certificate_file(directory, AUTHORITY)


async def add_user(settings: UserSettings, stop: asyncio.Event) -> None:
    """Write the credentials of one user of a cell; one that is there keeps its key.

    Raises `InvalidCellDirectory` if it is there with another class.
    """
    cell, user_class = CellDirectory.open(settings.directory), UserClass(settings.user_class)
    pools = tuple(_parse_pool(each) for each in settings.model) or None
    pins = Pins(id=None if settings.any_id else settings.name, pools=pools)
    file = cell.add_user(settings.name, user_class, pins, settings.expires)
    if not settings.as_json:
        print(file)
        return
    made = read_credentials(file, now=0)
    facts = {"name": made.name, "class": user_class, "file": file, "user": made.user}
    account = ACCOUNT_OF[user_class]
    print(json.dumps(_as_text({**facts, "account": account, "expires_at": made.expires_at})))


def _parse_pool(model: str) -> tuple[str, str]:
    name, _, version = model.partition("@")
    return name, version or "*"


def _as_text(facts: Any) -> Any:
    """Paths in it as text."""
    if isinstance(facts, dict):
        return {str(key): _as_text(value) for key, value in facts.items()}
    return str(facts) if isinstance(facts, Path) else facts
