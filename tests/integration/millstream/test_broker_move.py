"""`millstream broker move`: one stopped server's streams, with everything in them, to accounts."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import StorageType

from millstream.broker import store_move
from millstream.broker.store_move import MoveRefused
from millstream.up.data_directory import open_data_directory
from tests.support.gateways import cell
from tests.support.minted_accounts import MintedAccounts
from tests.support.nats_server import NatsServer
from tests.support.stored_streams import (
    KV,
    LEDGER,
    NAMES,
    USAGE,
    StreamFacts,
    fill_streams,
    read_facts,
    store_again,
)

OWNERS = {LEDGER: "CONTROL", "KV_*": "CONTROL", USAGE: "WORK"}
KILLS = """
import os, signal, sys
from millstream import cli
left = int(sys.argv.pop(1))
def fatal(call):
    def counted(*args, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    return counted
for name in ("rename", "mkdir", "rmdir", "fsync"):
    setattr(os, name, fatal(getattr(os, name)))
sys.exit(cli.main(sys.argv[1:]))
"""


class StoppedStore:
    """The data directory of a server that ran without accounts, and the accounts to come."""

    def __init__(self, home: Path) -> None:
        self.data, self.accounts = home / "data", MintedAccounts(("CONTROL", "WORK"))
        self.table = home / "accounts.json"
        self.nats = self.data / "nats"
        self.nats.mkdir(parents=True)
        owners = {stream: self.accounts.key(store) for stream, store in OWNERS.items()}
        self.table.write_text(json.dumps(owners))

    async def fill(self) -> StreamFacts:
        server = NatsServer(self.nats)
        try:
            client = await nats.connect(server.url)
            await fill_streams(client)
            facts = await read_facts(dict.fromkeys(NAMES, client))
            await client.close()
        finally:
            _stop(server)
        return facts

    @property
    def words(self) -> list[str]:
        return ["broker", "move", str(self.data), "--accounts", str(self.table)]

    def run(self, *more: str) -> "subprocess.CompletedProcess[str]":
        """The command, as an operator calls it."""
        command = [sys.executable, "-m", "millstream", *self.words, *more]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    @asynccontextmanager
    async def started_with_accounts(self) -> AsyncIterator[dict[str, Client]]:
        """A connection for each stream, into the account that owns it."""
        configuration = self.accounts.write_configuration(self.data / "nats.conf", self.nats)
        server = NatsServer(self.nats, configuration=configuration)
        control = await nats.connect(server.url, **self.accounts.user("CONTROL"))
        work = await nats.connect(server.url, **self.accounts.user("WORK"))
        try:
            yield {LEDGER: control, KV: control, USAGE: work}
        finally:
            await control.close()
            await work.close()
            _stop(server)

    def names_in(self, account: str) -> set[str]:
        folder = self.nats / "jetstream" / account / "streams"
        return {path.name for path in folder.iterdir()} if folder.exists() else set()


def _stop(server: NatsServer) -> None:
    server.process.terminate()
    server.process.wait()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StreamFacts]:
    """A store that is copied for each test, and what is in it."""
    made = StoppedStore(tmp_path_factory.mktemp("store"))
    return made.data, asyncio.run(made.fill())


@pytest.fixture
def store(tmp_path: Path, filled: tuple[Path, StreamFacts]) -> StoppedStore:
    made = StoppedStore(tmp_path)
    shutil.copytree(filled[0], made.data, dirs_exist_ok=True)
    return made


async def test_everything_is_there_behind_a_move(
    store: StoppedStore, filled: tuple[Path, StreamFacts]
) -> None:
    """Messages, sequences, what consumers had, revisions, counters; a repeat is still a repeat."""
    told = json.loads((await asyncio.to_thread(store.run, "--json")).stdout)
    assert told["moved"]
    assert [row["stream"] for row in told["streams"]] == sorted(NAMES)
    assert not (store.nats / "jetstream" / "$G").exists()
    async with store.started_with_accounts() as clients:
        assert await read_facts(clients) == filled[1]
        assert (await store_again(clients[LEDGER])).duplicate
        added = (
            await clients[USAGE].jetstream().publish("infer.usage.acme", headers={"Nats-Incr": "5"})
        )
        counter = await clients[USAGE].jetstream().get_msg(USAGE, added.seq)
        assert json.loads(counter.data or b"") == {"val": "20"}


async def test_the_store_of_a_cell_is_moved_whole(tmp_path: Path) -> None:
    """Every stream and bucket as services make them, with what is in it."""
    store = StoppedStore(tmp_path)
    store.table.write_text(json.dumps({"*": store.accounts.key("CONTROL")}))
    server = NatsServer(store.nats)
    try:
        async with cell(server.url) as (gateway,):
            assert (await gateway.complete()).status == 200
        client = await nats.connect(server.url)
        before = {each.config.name: each for each in await client.jetstream().streams_info()}
        await client.close()
    finally:
        _stop(server)
    assert (await asyncio.to_thread(store.run)).returncode == 0
    async with store.started_with_accounts() as clients:
        found = await clients[LEDGER].jetstream(timeout=10).streams_info()
    after = {each.config.name: each for each in found}
    stored = {name for name, each in before.items() if each.config.storage == StorageType.FILE}
    assert stored == set(after)
    assert len(stored) > 10
    for name, each in after.items():
        assert each.config == before[name].config, name
        assert each.state.messages == before[name].state.messages, name
        assert each.state.last_seq == before[name].state.last_seq, name


def test_a_dry_run_says_it_and_changes_nothing(store: StoppedStore) -> None:
    """An operator looks first."""
    out = store.run("--dry-run").stdout
    assert store.accounts.key("WORK") in out
    assert "moved: False" in out
    assert store.names_in("$G") == {*NAMES}


async def test_a_move_that_is_killed_anywhere_is_finished_by_the_next(
    store: StoppedStore, filled: tuple[Path, StreamFacts]
) -> None:
    """Killed at each change of the disk in turn, until one run is not killed at all."""
    for number in range(100):
        killed = await asyncio.to_thread(_run_and_kill, store, number)
        places = [
            store.names_in(account)
            for account in ("$G", *map(store.accounts.key, ("CONTROL", "WORK")))
        ]
        assert set().union(*places) == {*NAMES}
        assert sum(map(len, places)) == len(NAMES)
        if not killed:
            break
    assert number > 2
    async with store.started_with_accounts() as clients:
        assert await read_facts(clients) == filled[1]


def _run_and_kill(store: StoppedStore, number: int) -> bool:
    command = [sys.executable, "-c", KILLS, str(number), *store.words]
    status = subprocess.run(command, check=False, capture_output=True).returncode
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_a_running_server_keeps_its_streams(store: StoppedStore) -> None:
    """Whether it is one of `millstream up`, or any other that has the files open."""
    server = NatsServer(store.nats)
    try:
        refused = store.run()
        assert f"process {server.process.pid} uses" in refused.stderr
    finally:
        _stop(server)
    with open_data_directory(store.data):
        assert "another `millstream up` uses" in store.run().stderr
    assert store.names_in("$G") == {*NAMES}


def test_a_clusters_store_is_refused_with_what_to_do_instead(store: StoppedStore) -> None:
    """Its servers would delete the moved streams half a minute after their start."""
    (store.nats / "jetstream/$SYS/_js_/_meta_").mkdir(parents=True)
    refused = store.run()
    assert refused.returncode == 1
    assert "`millstream broker backup` before accounts" in refused.stderr
    assert store.names_in("$G") == {*NAMES}


def test_what_is_unclear_is_refused_before_anything_moves(
    store: StoppedStore, tmp_path: Path
) -> None:
    """A stream without an owner, one in two places, one encrypted; no store at all."""
    key = store.accounts.key("CONTROL")
    store.table.write_text(json.dumps({LEDGER: key}))
    assert f"no account for {KV}, {USAGE}" in store.run().stderr
    jetstream = store.nats / "jetstream"
    for folder, said in (
        (jetstream / key / "streams" / LEDGER, "is in both"),
        (jetstream / "$G/streams" / LEDGER / "meta.key", "is encrypted"),
    ):
        folder.mkdir(parents=True)
        with pytest.raises(MoveRefused, match=said):
            store_move.plan_move(jetstream, {"*": key})
        folder.rmdir()
    assert store.names_in("$G") == {*NAMES}
    with pytest.raises(MoveRefused, match="no store of a nats-server"):
        store_move.find_store(tmp_path / "data/nats/jetstream")
