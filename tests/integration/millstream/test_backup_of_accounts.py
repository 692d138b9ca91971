"""Three nodes are backed up, wiped and restored: a cluster gets accounts, and keeps them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, StorageType, StreamConfig
from nats.js.errors import APIError, NoStreamResponseError

import admin.service
from admin.settings import AdminSettings
from millstream.admin.admin_client import AdminRefused, HttpAdminClient
from millstream.broker.backup_commands import backup, restore
from millstream.broker.backup_manifest import BackupUnusable, read_manifest
from millstream.broker.backup_settings import BackupSettings, RestoreSettings
from millstream.broker.store_connections import StoresClosed, open_stores
from millstream.broker.stream_snapshots import SnapshotFailed, call_api, list_streams
from streams import topology
from streams.accounts.access import UserClass, store_of
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.credentials_file import UserCredentials, parse_credentials
from streams.accounts.rights import STORES
from streams.broker import declaration
from streams.broker.broker_client import Broker, connect
from tests.support.accounts_cell import AccountClient, AccountsCell
from tests.support.admins import ADMIN_KEY, answers, running_admin
from tests.support.eventually import eventually
from tests.support.gateways import cell as serving_cell
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.services import running

STOP = asyncio.Event()
SUBMIT = "infer.submit.acme.mock.batch"
CONFIGURATION = Path(topology.__file__).parent / "nats/cluster.conf"


class PlainCluster:
    """Three nodes of the shipped configuration, without accounts."""

    def __init__(self, home: Path) -> None:
        self._home, self._routes = home, [free_port() for _ in range(3)]
        self.nodes: list[NatsServer] = []

    def start(self) -> None:
        routes = json.dumps([f"nats://127.0.0.1:{port}" for port in self._routes])
        for number, port in enumerate(self._routes):
            store = self._home / f"p{number}"
            store.mkdir(parents=True)
            text = CONFIGURATION.read_text().replace("$NATS_NAME", f"p{number}")
            text = text.replace("$NATS_ROUTES", routes).replace("/data/", f"{store}/")
            text = text.replace("0.0.0.0:6222", f"127.0.0.1:{port}")
            text = text.replace('http: "127.0.0.1:8222"', "")
            (store / "nats.conf").write_text(text)
            self.nodes.append(NatsServer(store, configuration=store / "nats.conf"))

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[PlainCluster]:
    made = PlainCluster(tmp_path / "plain")
    made.start()
    yield made
    made.stop()


@asynccontextmanager
async def started(home: Path, count: int) -> AsyncIterator[AccountsCell]:
    made = AccountsCell(home, count)
    try:
        made.start()
        await eventually(lambda: made.has_servers(count))
        await eventually(lambda: has_leader(made))
        yield made
    finally:
        made.close()


async def has_leader(cell: AccountsCell) -> bool:
    """Return whether the servers of a cell place streams."""
    async with cell.connected(cell.directory.sign_owner(STORES[0], "test", 60)) as client:
        return await places_streams(client, len(cell.nodes))


async def places_streams(client: Client, replicas: int) -> bool:
    """Return whether servers that have just started have a leader, and know each other."""
    config = StreamConfig("PROBE", storage=StorageType.MEMORY, num_replicas=replicas)
    with suppress(nats.errors.Error, APIError, TimeoutError):  # JetStream may not answer yet
        await client.jetstream().add_stream(config)
        return await client.jetstream().delete_stream("PROBE")
    return False


def url_of(cell: AccountsCell) -> str:
    return ",".join(node.url for node in cell.nodes)


def given(cell: AccountsCell, folder: Path, **options: Any) -> dict[str, Any]:
    """Options that both commands are given for a cell."""
    keys = cell.directory.path
    return {"nats": url_of(cell), "broker_keys": keys, "folder": folder, **options}


async def run_backup(cell: AccountsCell, folder: Path, **options: Any) -> None:
    await backup(BackupSettings.model_validate(given(cell, folder, **options)), STOP)


async def run_restore(cell: AccountsCell, folder: Path, **options: Any) -> None:
    await restore(RestoreSettings.model_validate(given(cell, folder, **options)), STOP)


async def read_streams(**given: Any) -> dict[str, Any]:
    """All that files of a broker hold: configuration, state, messages and consumers of each."""
    settings = BackupSettings.model_validate({"folder": Path("unused"), **given})
    found = {}
    async with open_stores(settings, "test") as stores:
        for store in stores:
            for each in await eventually(lambda broker=store.broker: try_to_list(broker)):  # type: ignore[misc]
                if each["config"]["storage"] == "file":
                    found[each["config"]["name"]] = await _read_stream(store.broker, each)
    return found


async def try_to_list(broker: Broker) -> list[dict[str, Any]]:
    """All streams; none while a young one has no leader yet."""
    with suppress(SnapshotFailed):
        return await list_streams(broker)
    return []


async def _read_stream(broker: Broker, told: Mapping[str, Any]) -> dict[str, Any]:
    config, state = dict(told["config"]), told["state"]
    config["metadata"] = {
        name: value
        for name, value in (config.get("metadata") or {}).items()
        if name != "millstream.backup"
    }
    stored = [
        await call_api(broker, f"STREAM.MSG.GET.{config['name']}", {"seq": number})
        for number in range(state["first_seq"], state["last_seq"] + 1)
    ]
    consumers = (await call_api(broker, f"CONSUMER.LIST.{config['name']}")).get("consumers") or []
    return {
        "config": config,
        "state": [state[key] for key in ("messages", "first_seq", "last_seq")],
        "messages": [each.get("message") for each in stored],
        "consumers": {
            each["name"]: (
                each["config"].get("filter_subject"),
                each["ack_floor"]["stream_seq"],
                each["num_pending"] + each["num_ack_pending"],
            )
            for each in consumers
            if not each["config"].get("inactive_threshold")  # others end with their readers
        },
    }


async def has_all(cell: AccountsCell, before: Mapping[str, Any]) -> None:
    """Return when a cell has what was stored; leaders of consumers may count for a moment."""
    different: dict[str, Any] = {}

    async def is_same() -> bool:
        after = await read_streams(**given(cell, Path("unused")))
        assert {*after} == {*before}
        different.clear()
        different.update({n: (after[n], before[n]) for n in before if after[n] != before[n]})
        return not different

    with suppress(AssertionError):
        await eventually(is_same, 20.0)
    assert not different


@asynccontextmanager
async def admin_of(cell: AccountsCell) -> AsyncIterator[HttpAdminClient]:
    """An admin service that holds the cell's keys, and a client."""
    port, creds = free_port(), cell.directory.add_user("admin", UserClass.ADMIN)
    cell.directory.add_user("system", UserClass.SYSTEM)
    told = {
        "nats": url_of(cell),
        "nats_creds": creds,
        "admin_key": ADMIN_KEY,
        "admin_port": port,
        "broker_keys": cell.directory.path,
        "replicas": len(cell.nodes),
    }
    async with running(admin.service, AdminSettings.model_validate(told)):
        client = HttpAdminClient(f"http://127.0.0.1:{port}", ADMIN_KEY)
        await eventually(lambda: answers(client))
        yield client


async def issue(client: HttpAdminClient, tenant: str) -> UserCredentials:
    """Credentials of a new tenant that publishes, once the admin service can make them."""
    await client.call("tenants.add", name=tenant, publishes=True)
    found: list[Mapping[str, Any]] = []

    async def is_issued() -> bool:
        try:
            found.append(await client.call("credentials.issue", name=tenant))
        except AdminRefused as refusal:
            if refusal.code not in ("accounts_not_told", "broker_unavailable"):
                raise
        return bool(found)

    await eventually(is_issued)
    return parse_credentials(found[0]["credentials"], "the answer", 0)


async def submit(producer: AccountClient) -> int:
    """The sequence of a submission; 0 while there is no stream for it."""
    try:
        return (await producer.jetstream().publish(SUBMIT, b"{}")).seq
    except NoStreamResponseError:
        return 0


def forget_everything(cell: AccountsCell) -> None:
    """Start the nodes again without what they have stored, or know of accounts."""
    for number, node in enumerate(cell.nodes):
        node.wipe()
        cell.lose_accounts(number)
    for node in cell.nodes:
        node.start()


async def judge_ledger(url: str) -> None:
    """A reader of the ledger that has acknowledged one record, and has another one un-acked."""
    async with connect(url, "judge") as broker:
        await declaration.declare_consumer(
            broker, topology.LEDGER, ConsumerConfig(durable_name="judge")
        )
        pull = await broker.js.pull_subscribe_bind("judge", topology.LEDGER)
        first, _ = await pull.fetch(2)
        await first.ack_sync()


async def test_a_cluster_gets_accounts_by_a_planned_stop(
    plain: PlainCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps of docs/backup.md lose nothing of what a serving cell has stored."""
    client = await nats.connect(plain.nodes[0].url)
    await eventually(lambda: places_streams(client, 3))
    await client.close()
    async with running_admin(plain.url, replicas=3) as admins:
        await admins.call("tenants.add", name="later")
        async with serving_cell(plain.url) as (gateway,):
            for _ in range(3):
                assert (await gateway.complete()).status == 200
    await judge_ledger(plain.url)
    before = await read_streams(nats=plain.url)
    assert before[topology.LEDGER]["consumers"]["judge"][2] >= 2
    settings = {"nats": plain.url, "folder": tmp_path / "backup"}
    await backup(BackupSettings.model_validate(settings), STOP)
    plain.stop()
    async with started(tmp_path / "cell", 3) as cell:
        capsys.readouterr()
        await run_restore(cell, tmp_path / "backup", json=True)
        told = json.loads(capsys.readouterr().out)
        accounts = cell.directory.read().accounts
        assert {each["stream"]: each["account"] for each in told["streams"]} == {
            name: accounts[store_of(name)].public for name in before
        }
        await has_all(cell, before)
        async with admin_of(cell) as admins:
            tenants = (await admins.call("tenants.list"))["data"]
            assert "later" in [each["name"] for each in tenants]


async def test_a_cell_with_accounts_is_restored_with_its_tenants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both stores come back, and tenants' accounts, whose credentials stay as they are."""
    folder = tmp_path / "backup"
    async with started(tmp_path / "cell", 3) as cell:
        async with admin_of(cell) as client:
            acme, gone = await issue(client, "acme"), await issue(client, "gone")
            await client.call("credentials.withdraw", name="gone")
            async with cell.connected(acme) as producer:
                first = await eventually(lambda: submit(producer))
        before = await read_streams(**given(cell, folder))
        assert {store_of(name) for name in before} == {*STORES}
        await run_backup(cell, folder, json=True)
        told = json.loads(capsys.readouterr().out)
        assert {each["stream"] for each in told["streams"]} == {*before}
        assert topology.token_stream_name(0) in told["left_out"]
        forget_everything(cell)
        await eventually(lambda: cell.has_servers(3))
        await eventually(lambda: has_leader(cell))
        await run_restore(cell, folder)
        await has_all(cell, before)
        assert not await cell.is_let_in(acme)  # nobody has told the servers of it yet
        async with admin_of(cell):
            await eventually(lambda: cell.is_let_in(acme))
            async with cell.connected(acme) as producer:
                assert await eventually(lambda: submit(producer)) == first + 1
            assert not await cell.is_let_in(gone)


async def test_what_opens_no_store_is_told(tmp_path: Path) -> None:
    """Credentials of a process, keys of another cell, and keys that lack one."""
    folder = tmp_path / "backup"
    other = CellDirectory.create(tmp_path / "other", shards=1)
    async with started(tmp_path / "cell", 1) as cell:
        creds = cell.directory.add_user("operator", UserClass.OPERATOR)
        with pytest.raises(StoresClosed, match="credentials of a process.*--broker-keys"):
            await run_backup(cell, folder, broker_keys=None, nats_creds=creds)
        with pytest.raises(StoresClosed, match=f"lets nobody in by the keys in {other.path}"):
            await run_backup(cell, folder, broker_keys=other.path)
        async with admin_of(cell):
            pass
        await run_backup(cell, folder)
        with pytest.raises(SnapshotFailed, match=r"exists already.*Stop all services"):
            await run_restore(cell, folder)
    async with started(tmp_path / "second", 1) as second:
        with pytest.raises(BackupUnusable, match="--other-cell"):
            await run_restore(second, folder)
        await run_restore(second, folder, other_cell=True)
        restored = await read_streams(**given(second, folder))
        assert {*restored} == {each.name for each in read_manifest(folder).streams}


async def test_no_right_stays_behind(tmp_path: Path) -> None:
    """The users of a backup are nobody's: no file has them, and they end within a day."""
    async with started(tmp_path / "cell", 1) as cell:
        before = sorted((cell.directory.path / "users").iterdir())
        user = cell.directory.sign_owner(STORES[0], "backup", 60)
        assert await cell.is_let_in(user)
        assert user.expires_at is not None
        assert user.expires_at <= time.time() + 60
        await run_backup(cell, tmp_path / "backup")
        assert sorted((cell.directory.path / "users").iterdir()) == before
