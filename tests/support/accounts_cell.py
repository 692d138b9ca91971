"""Real nats-servers with accounts, and clients of each class, whose violations are noted."""

import asyncio
import json
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import RePublish, StorageType, StreamConfig
from nats.js.errors import ServiceUnavailableError

from streams import topology
from streams.accounts import access
from streams.accounts.access import UserClass, api_prefix
from streams.accounts.cell_directory import TENANT_PREFIX, TENANT_USERS
from streams.accounts.claims import EVERYTHING
from streams.accounts.credentials_file import UserCredentials, read_credentials
from streams.accounts.minting import NewUser
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.accounts.rights import Pins
from streams.accounts.server_configuration import ROUTES_USER, node_configuration, with_tls
from streams.broker.account_claims import list_servers
from streams.broker.nats_client import PatchedNatsClient
from streams.certificate_files import write_server
from streams.topology import Scale
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.tenant_directory import TenantDirectory

_VIOLATION = re.compile(r'(?i)permissions violation for \w+ to "([^"]*)"')
_NOBODYS = "nobody.may"
ANSWER_SECONDS = 5.0


class AccountClient(PatchedNatsClient):
    """A client that notes which subjects the server has refused it."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()
        self.was_closed = asyncio.Event()

    async def note(self, error: Exception) -> None:
        self.refused |= set(_VIOLATION.findall(str(error)))

    async def on_closed(self) -> None:
        self.was_closed.set()

    async def refused_to_publish(self, subjects: Iterable[str]) -> set[str]:
        """Publish on all of them; those of which the server says that this user may not."""
        return await self._refused(subjects, self.publish)

    async def refused_to_hear(self, subjects: Iterable[str]) -> set[str]:
        """Subscribe to all of them; those of which the server says that this user may not."""
        return await self._refused(subjects, self.subscribe)

    async def _refused(
        self, subjects: Iterable[str], use: Callable[[str], Awaitable[object]]
    ) -> set[str]:
        """The answers come in order, but perhaps after that to a ping: a last one is the end."""
        wanted = {subject.lower(): subject for subject in subjects}  # nats-py tells them so
        self.refused.clear()
        for subject in (*wanted.values(), _NOBODYS):
            await use(subject)
        await eventually(lambda: _NOBODYS in self.refused)
        return {wanted[each] for each in self.refused - {_NOBODYS}}

    async def ask(self, subject: str, payload: bytes = b"", **headers: str) -> Any:
        """The first answer, as JSON; None if nobody listens."""
        try:
            answer = await self.request(
                subject, payload, timeout=ANSWER_SECONDS, headers=headers or None
            )
        except nats.errors.NoRespondersError:
            return None
        return json.loads(answer.data)


class AccountsCell:
    """One server or three of a cell of their own, by number."""

    def __init__(self, home: Path, count: int, *, encrypts: bool = False) -> None:
        self._home, self._count = home, count
        self.certificates = home / "tls" if encrypts else None
        self.directory = TenantDirectory.create(home / "keys", shards=1)
        self.cluster_ports = [free_port() for _ in range(count)]
        self.nodes: list[NatsServer] = []

    def start(self) -> None:
        names = [f"n{number}" for number in range(self._count)]
        block = self.directory.accounts_block()
        for number, name in enumerate(names):
            store = self.store(number)
            store.mkdir(parents=True)
            text = node_configuration(block, name, names, str(store))
            if self.certificates:
                write_server(self.certificates, name, (name,), datetime.now(UTC))
                text = with_tls(text, name, str(self.certificates))
            file = self.directory.write_node(name, text)
            self.nodes.append(NatsServer(store, None, file, self._cluster_options(number)))

    def store(self, number: int) -> Path:
        return self._home / f"n{number}"

    def resolver_directory(self, number: int) -> Path:
        return self.store(number) / "accounts"

    def _cluster_options(self, number: int) -> Sequence[str]:
        if self._count == 1:
            return ()
        own, user = self.cluster_ports[number], f"{ROUTES_USER}:{self.directory.routes_password()}"
        routes = ",".join(f"nats://{user}@127.0.0.1:{p}" for p in self.cluster_ports if p != own)
        return (f"--cluster=nats://{user}@127.0.0.1:{own}", f"--routes={routes}")

    @asynccontextmanager
    async def client(
        self, user_class: UserClass, name: str = "", pins: Pins | None = None, node: int = 0
    ) -> AsyncIterator[AccountClient]:
        """A process of a class, called like it by default."""
        file = self.directory.add_user(name or str(user_class), user_class, pins=pins)
        async with self.connected(read_credentials(file, time.time()), node) as client:
            yield client

    def insider(self, account: str) -> UserCredentials:
        """A user who may do all that an account can, as whoever has stolen its key."""
        tenant = self.directory.tenants.get(account.removeprefix(TENANT_PREFIX))
        key = TENANT_USERS if tenant else account
        seed = (self.directory.path / f"keys/signing/{key}.seed").read_text()
        public = tenant.public if tenant else self.directory.read().accounts[account].public
        user = NewUser(UserClass.SYSTEM, "insider", KeyPair.generate(KeyKind.USER))
        signer = KeyPair.from_seed(seed)
        return user.sign(public, signer, time.time(), permissions=EVERYTHING)

    @asynccontextmanager
    async def connected(
        self, credentials: UserCredentials, node: int = 0
    ) -> AsyncIterator[AccountClient]:
        client = AccountClient()
        await eventually(lambda: self._connects(client, credentials, node))
        try:
            yield client
        finally:
            if not client.is_closed:
                await client.close()

    async def is_let_in(self, credentials: UserCredentials, node: int = 0) -> bool:
        """Whether a server lets a user in."""
        client = AccountClient()
        with suppress(nats.errors.Error, OSError):
            await self._connect(client, credentials, node)
        is_in = client.is_connected
        await client.close()
        return is_in

    async def _connects(
        self, client: AccountClient, credentials: UserCredentials, node: int
    ) -> bool:
        with suppress(nats.errors.Error, OSError):
            await self._connect(client, credentials, node)
        return client.is_connected

    async def _connect(
        self, client: AccountClient, credentials: UserCredentials, node: int
    ) -> None:
        await client.connect(
            self.nodes[node].url,
            user_jwt_cb=credentials.user_jwt,
            signature_cb=credentials.sign_nonce,
            inbox_prefix=credentials.inbox_prefix.encode(),
            allow_reconnect=False,
            error_cb=client.note,
            closed_cb=client.on_closed,
        )

    async def has_servers(self, count: int) -> bool:
        """Whether so many servers live and know each other."""
        living = next(n for n, node in enumerate(self.nodes) if node.process.poll() is None)
        async with self.client(UserClass.SYSTEM, node=living) as system:
            return len(await list_servers(system)) == count

    async def declare(self) -> None:
        """Make all streams, as the admin service does."""
        async with self.client(UserClass.ADMIN, "declarer") as client:
            for config in self._configs():
                config.num_replicas = self._count
                await eventually(partial(_declares, client, config))

    def _configs(self) -> list[StreamConfig]:
        declared = topology.stream_configs(Scale(), 100)
        known = {config.name for config in declared}
        missing = [each for each in access.BUCKETS if each not in known]
        buckets = [_bucket(each.removeprefix("KV_")) for each in missing]
        for config in (*declared, *buckets):
            config.storage, config.max_bytes = StorageType.MEMORY, 1_000_000
        return [*declared, *buckets]

    def lose_accounts(self, number: int) -> None:
        """What the node has been told of accounts is gone from its disk."""
        shutil.rmtree(self.resolver_directory(number))

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


def _bucket(name: str) -> StreamConfig:
    return StreamConfig(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        max_msgs_per_subject=8,
        allow_direct=True,
        republish=RePublish(src=f"$KV.{name}.>", dest=f"infer.changed.{name}.>"),
    )


def admin_api(client: Client, stream: str) -> JetStreamContext:
    """JetStream's management API for a stream, as the admin service reaches it."""
    prefix = api_prefix(UserClass.ADMIN, stream)
    return JetStreamContext(client, prefix=prefix, timeout=ANSWER_SECONDS)


async def _declares(client: Client, config: StreamConfig) -> bool:
    """Whether the stream was made; while a leader is elected it is not."""
    try:
        await admin_api(client, config.name or "").add_stream(config)
    except (nats.errors.Error, ServiceUnavailableError, TimeoutError):
        return False
    return True
