"""Attacks without credentials of the cell: no user, made-up users, and the nodes' routes."""

import asyncio
import base64
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from streams.accounts import claims_token
from streams.accounts.access import UserClass
from streams.accounts.cell_directory import TENANT_USERS, CellDirectory
from streams.accounts.claims import EVERYTHING
from streams.accounts.credentials_file import UserCredentials, credentials_of, read_credentials
from streams.accounts.minting import NewUser
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.accounts.rights import BrokerAccount
from tests.adversary.canaries import Received
from tests.adversary.cell import KEYS, MALLORY, RunningCell
from tests.adversary.target_subjects import MARK

_READ_SECONDS = 3.0
_NO_KEY = ""


def _plain_connects() -> list[dict[str, object]]:
    """Claims that a client without a signed token may make of itself."""
    key = KEYS[MALLORY]
    return [
        {},
        {"user": "admin", "pass": "admin"},
        {"user": MALLORY, "pass": key},
        {"auth_token": key},
        {"jwt": _NO_KEY, "sig": _NO_KEY},
        {"nkey": KeyPair.generate(KeyKind.USER).public, "sig": "AAAA"},
        {"account": str(BrokerAccount.CONTROL), "new_account": True},
    ]


def _made_up_users(cell: RunningCell) -> Iterator[tuple[str, UserCredentials]]:
    """Tokens that look like those of the cell, by how they were made."""
    directory = cell.broker.directory
    accounts = directory.read().accounts
    for account in (BrokerAccount.CONTROL, BrokerAccount.SYSTEM, BrokerAccount.ADMIN):
        user = NewUser(UserClass.ADMIN, MARK, KeyPair.generate(KeyKind.USER))
        signer = KeyPair.generate(KeyKind.ACCOUNT)
        public = accounts[account].public
        made = user.sign(public, signer, time.time(), permissions=EVERYTHING)
        yield f"signed by a key of nobody, for {account}", made
        yield f"without a signature, for {account}", _unsigned(made)
    own = cell.tenant_user(MALLORY)
    for account in (BrokerAccount.CONTROL, BrokerAccount.WORKERS):
        yield f"a tenant's, changed to {account}", _changed(own, accounts[account].public)
    yield "a tenant's token with another key", replace(own, key=KeyPair.generate(KeyKind.USER))
    user = NewUser(UserClass.TENANT, MALLORY, own.key, expires_at=int(time.time()) - 60)
    seed = directory.path / f"keys/signing/{TENANT_USERS}.seed"
    signer = KeyPair.from_seed(seed.read_text())
    yield "expired", user.sign(own.account, signer, time.time() - 120)
    with tempfile.TemporaryDirectory() as home:
        other = CellDirectory.create(Path(home), shards=1)
        yield "of another cell", read_credentials(other.add_user("a1", UserClass.ADMIN), 0)


def _unsigned(made: UserCredentials) -> UserCredentials:
    header = base64.urlsafe_b64encode(b'{"typ":"JWT","alg":"none"}').rstrip(b"=").decode()
    _, claims, _ = made.token.split(".")
    return replace(made, token=f"{header}.{claims}.")


def _changed(own: UserCredentials, account: str) -> UserCredentials:
    """A valid token with other claims under its old signature."""
    claims = claims_token.decode(own.token)
    claims["nats"]["issuer_account"] = account
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    header, _, signature = own.token.split(".")
    return replace(credentials_of(own.token, claims, own.key), token=f"{header}.{body}.{signature}")


async def connect(cell: RunningCell, received: Received) -> tuple[int, int, list[str]]:
    """Every way to come in without credentials; who comes in is told."""
    tries, let_in = 0, list[str]()
    for number in range(len(cell.broker.nodes)):
        for told in _plain_connects():
            tries += 1
            said = await _say(cell.url(number), told)
            received.add(said)
            if b"PONG" in said or b"MSG" in said:
                let_in.append(f"let in with {sorted(told)}")
        for how, credentials in _made_up_users(cell):
            tries += 1
            if await cell.broker.is_let_in(credentials, number):
                let_in.append(f"let in with a token {how}")
    return tries, tries - len(let_in), let_in


async def _say(url: str, told: dict[str, object]) -> bytes:
    """Answer of a server to a client that subscribes to everything, and says this of itself."""
    host, port = url.removeprefix("nats://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    hello = json.dumps({"verbose": False, "headers": True, "lang": "c", **told})
    writer.write(f"CONNECT {hello}\r\nSUB > 1\r\nPUB infer.gone 0\r\n\r\nPING\r\n".encode())
    return await _rest(reader, writer)


async def _rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Bytes that come until a server closes, or for some seconds."""
    said = b""
    try:
        async with asyncio.timeout(_READ_SECONDS):
            while part := await reader.read(65536):
                said += part
    except (TimeoutError, OSError):
        pass
    writer.close()
    return said


async def join_cluster(cell: RunningCell, received: Received) -> tuple[int, int, list[str]]:
    """Pose as one more server: it would hear every message of all accounts, and write any."""
    holes = list[str]()
    accounts = cell.broker.directory.read().accounts
    stores = [accounts[each].public for each in (BrokerAccount.CONTROL, BrokerAccount.WORK)]
    passwords = (None, "", MARK)
    for port in cell.broker.cluster_ports:
        for password in passwords:
            said = await _pose_as_server(port, password, stores)
            received.add(said)
            if b"RS+" in said or b"RMSG" in said:
                holes.append(f"a server with the password {password!r} was let in")
    tries = len(cell.broker.cluster_ports) * len(passwords)
    return tries, tries - len(holes), holes


async def _pose_as_server(port: int, password: str | None, accounts: list[str]) -> bytes:
    """Answer of a node to a server that wants everything of these accounts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    told = json.loads((await reader.readline()).removeprefix(b"INFO "))
    name = f"N{MARK.upper()}"
    info = {**told, "server_id": name, "server_name": MARK, "port": 1, "route_pool_size": 0}
    hello: dict[str, object] = {"name": name, "cluster": told["cluster"], "headers": True}
    if password is not None:
        hello |= {"user": "node", "pass": password}
    wanted = "".join(f"RS+ {account} >\r\n" for account in accounts)
    forged = f"RMSG {accounts[0]} $KV.tenants.{MARK} 6\r\nforged\r\n"
    text = f"CONNECT {json.dumps(hello)}\r\nINFO {json.dumps(info)}\r\nPING\r\n{wanted}{forged}"
    writer.write(text.encode())
    return await _rest(reader, writer)
