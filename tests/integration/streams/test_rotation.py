"""Credentials and certificates are replaced while requests flow, and none of these fails."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from streams import topology
from streams.broker import declaration, reconnecting_client
from streams.broker.broker_client import Broker
from streams.broker.pull_loop import Delivery, PullLoop
from streams.connection_files import ConnectionFiles
from streams.subjects import PoolKey, Priority
from tests.support.accounts_server import connect
from tests.support.certificates import CertificateAuthority
from tests.support.eventually import eventually
from tests.support.operator_server import OperatorServer

WORK = topology.work_consumer(PoolKey("m", "1", Priority.BATCH), 3.0)
SUBJECT = "infer.work.m.1.batch.any"
NEWS = "infer.news"


class Trust:
    """The files of a server and of its clients, of which each trusts one or two authorities."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authorities = [CertificateAuthority(folder, "first")]
        self.issue()
        self.trust_all()

    def add_authority(self) -> None:
        """Trust a second authority, which signs from now on."""
        self._authorities.append(CertificateAuthority(self._folder, "second"))
        self.trust_all()

    def drop_authority(self) -> None:
        """Trust the second authority alone."""
        del self._authorities[0]
        self.trust_all()

    def trust_all(self) -> None:
        texts = [authority.pair.certificate for authority in self._authorities]
        (self._folder / "trusted.pem").write_bytes(b"".join(texts))
        self.admin = {"tls_handshake_first": True, "tls": self._context()}

    def issue(self) -> None:
        """Certificates of the server and of its clients by the newest authority."""
        self.server = self._authorities[-1].issue("server")
        self.client = self._authorities[-1].issue("client")

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._folder / "trusted.pem")
        context.load_cert_chain(self.client.cert, self.client.key)
        return context

    def files(self, creds: Path) -> ConnectionFiles:
        return ConnectionFiles(
            creds, None, self._folder / "trusted.pem", self.client.cert, self.client.key
        )

    def block(self) -> str:
        """The `tls` block of a server's configuration."""
        return (
            f'tls {{ cert_file: "{self.server.cert}", key_file: "{self.server.key}", '
            f'ca_file: "{self._folder}/trusted.pem", verify: true, handshake_first: true }}'
        )


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return Trust(tmp_path)


@pytest.fixture
def server(tmp_path: Path, trust: Trust) -> Iterator[OperatorServer]:
    store = tmp_path / "operator"
    store.mkdir()
    made = OperatorServer(store, trust.block())
    yield made
    made.nats.kill()


class Flow:
    """Work that is stored, pulled and acknowledged, and news that are heard, all the time."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.stored, self.news = set[int](), 0
        self.done, self.heard = list[int](), set[int]()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        await self._broker.subscribe(NEWS, self._on_news)
        consumer = WORK.durable_name
        assert consumer
        pull = PullLoop(self._broker, topology.WORK, consumer, lambda: 10, self._on_delivery)
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(pull.run())
            await asyncio.gather(self._ask(), self._store())
            await eventually(lambda: self.stored <= set(self.done))
            await eventually(lambda: len(self.heard) == self.news)
            pulling.cancel()

    async def _store(self) -> None:
        while not self._stopping.is_set():
            self.stored.add((await self._broker.store(SUBJECT, b"x")).seq)

    async def _ask(self) -> None:
        """What only a leader answers, what any replica does, and what is heard if it is sent."""
        while not self._stopping.is_set():
            await declaration.stream_info(self._broker, topology.WORK)
            await self._broker.read(topology.REQUESTS, {"last_by_subj": "infer.request.>"})
            await self._broker.publish(NEWS, b"%d" % self.news)
            self.news += 1

    async def _on_news(self, msg: Msg) -> None:
        self.heard.add(int(msg.data))

    def _on_delivery(self, delivery: Delivery) -> None:
        self.done.append(delivery.seq)
        asyncio.get_running_loop().create_task(delivery.ack())

    def stop(self) -> None:
        """End once all that was stored is done, and all that was told is heard."""
        self._stopping.set()

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    @property
    def progress(self) -> int:
        return min(len(self.stored), len(self.done), len(self.heard))


@asynccontextmanager
async def flowing(broker: Broker) -> AsyncIterator[Flow]:
    """The flow of a connection; an error of it ends the test."""
    await declaration.declare(broker, topology.Scale(), max_queued=10)
    await declaration.declare_consumer(broker, topology.WORK, WORK)
    flow = Flow(broker)
    running = asyncio.create_task(flow.run())
    running.add_done_callback(lambda _: flow.stop())
    try:
        yield flow
        flow.stop()
        await running
    finally:
        running.cancel()
        await asyncio.wait({running})


async def goes_on(flow: Flow) -> None:
    """Wait until more was done of everything."""
    target = flow.progress + 20
    await eventually(lambda: flow.progress >= target or flow.is_stopped)
    assert not flow.is_stopped, "it has failed"


async def test_a_rotation_fails_no_request(
    server: OperatorServer, trust: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First both are trusted, then the files change, then the old ones are trusted no more."""
    monkeypatch.setattr(reconnecting_client, "FILE_CHECK_SECONDS", 0.05)
    path = server.write(tmp_path / "a.creds")
    async with connect(server.url, "test", trust.files(path)) as broker, flowing(broker) as flow:
        clients = {broker.client}

        def is_settled() -> bool:
            """True once one client is left, and it was made by the files as they are."""
            clients.add(broker.client)
            open_clients = [client for client in clients if not client.is_closed]
            newest = broker._fingerprint == broker._authentication.fingerprint()
            return newest and open_clients == [broker.client]

        async def taken_up() -> None:
            await eventually(is_settled)
            await goes_on(flow)

        await goes_on(flow)
        trust.add_authority()
        await server.reload()
        await taken_up()

        await server.add_signer(**trust.admin)
        trust.issue()
        await server.reload()
        server.write(path)
        await taken_up()

        trust.drop_authority()
        await server.reload()
        await taken_up()
        await server.drop_signers(**trust.admin)
        await goes_on(flow)
        assert len(clients) > 3
        assert is_settled(), "nothing was cut that uses what is trusted"
