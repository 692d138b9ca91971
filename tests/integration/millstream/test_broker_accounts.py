"""Accounts of `millstream up`: made before nats-server starts; and how it asks for health."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.broker.store_move import MoveRefused
from millstream.up import nats_server
from millstream.up.broker_accounts import BrokerAccounts, mint_accounts
from millstream.up.broker_health import connect_health
from millstream.up.data_directory import DataDirectory, open_data_directory
from streams.accounts.access import UserClass
from streams.broker import declaration, reconnecting_client
from streams.broker.broker_client import connect
from streams.connection_files import ConnectionFiles
from streams.errors import BrokerUnavailable
from streams.topology import LEDGER, WORK, Scale
from tests.support.nats_server import NatsServer

LEDGER_SUBJECT = "infer.ledger.acme.mock"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    with open_data_directory(tmp_path / "data") as made:
        yield made


class EmbeddedServer(NatsServer):
    """The server of a data directory, started as `up` starts it."""

    def __init__(self, directory: DataDirectory, accounts: BrokerAccounts) -> None:
        self.accounts = accounts
        program = nats_server.make_program(0, directory.nats_store, accounts.configuration)
        super().__init__(
            directory.nats_store, None, accounts.configuration, environment=program.environment
        )

    def files(self, user_class: UserClass) -> ConnectionFiles:
        return ConnectionFiles(creds=self.accounts.file(user_class))


async def stored(url: str, files: ConnectionFiles) -> list[bytes]:
    """Records of the ledger."""
    async with connect(url, "test", files) as broker:
        return [m.data for m in await broker.read_subject(LEDGER, LEDGER_SUBJECT)]


async def test_what_was_stored_before_accounts_is_there_after_the_start(
    directory: DataDirectory,
) -> None:
    """Each stream in the store that owns it; a second start changes nothing."""
    before = NatsServer(directory.nats_store)
    async with connect(before.url, "test") as broker:
        await declaration.declare(broker, Scale(), 100)
        await broker.store(LEDGER_SUBJECT, b"kept")
    before.process.terminate()
    before.process.wait()
    for _ in range(2):
        server = EmbeddedServer(directory, mint_accounts(directory, Scale().shards))
        try:
            assert await stored(server.url, server.files(UserClass.OPERATOR)) == [b"kept"]
            async with connect(server.url, "a", server.files(UserClass.ADMIN)) as admin:
                assert (await admin.js.stream_info(WORK)).state.messages == 0
        finally:
            server.kill()


async def test_a_move_that_was_killed_is_finished_at_the_next_start(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream is in one place or the other, and none is in two."""
    before = NatsServer(directory.nats_store)
    async with connect(before.url, "test") as broker:
        await declaration.declare(broker, Scale(), 100)
        await broker.store(LEDGER_SUBJECT, b"kept")
    before.process.terminate()
    before.process.wait()
    rename, moved = os.rename, list[Path]()

    def rename_two(source: Path, target: Path) -> None:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(target)
        rename(source, target)

    with monkeypatch.context() as killed:
        killed.setattr(os, "rename", rename_two)
        with pytest.raises(KeyboardInterrupt):
            mint_accounts(directory, Scale().shards)
    server = EmbeddedServer(directory, mint_accounts(directory, Scale().shards))
    try:
        assert await stored(server.url, server.files(UserClass.OPERATOR)) == [b"kept"]
        assert not (directory.nats_store / "jetstream/$G/streams").exists()
    finally:
        server.kill()


async def test_streams_of_lost_keys_are_refused_and_left_alone(directory: DataDirectory) -> None:
    """New keys would name new accounts, which are empty."""
    server = EmbeddedServer(directory, mint_accounts(directory, Scale().shards))
    async with connect(server.url, "test", server.files(UserClass.ADMIN)) as admin:
        await declaration.declare(admin, Scale(), 100)
    async with connect(server.url, "test", server.files(UserClass.DISPATCHER)) as dispatcher:
        await dispatcher.store(LEDGER_SUBJECT, b"kept")
    server.process.terminate()
    server.process.wait()
    kept = shutil.copytree(directory.broker_keys, directory.path / "copy")
    shutil.rmtree(directory.broker_keys)
    with pytest.raises(MoveRefused, match="bring that folder back"):
        mint_accounts(directory, Scale().shards)
    shutil.rmtree(directory.broker_keys)
    shutil.copytree(kept, directory.broker_keys)
    server = EmbeddedServer(directory, mint_accounts(directory, Scale().shards))
    try:
        assert await stored(server.url, server.files(UserClass.OPERATOR)) == [b"kept"]
    finally:
        server.kill()


async def test_nobody_gets_in_without_credentials(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that lets somebody in is its owner's alone."""
    monkeypatch.setattr(reconnecting_client, "OPEN_SECONDS", 1.0)
    server = EmbeddedServer(directory, mint_accounts(directory, Scale().shards))
    try:
        server.files(UserClass.OPERATOR)
        with pytest.raises(BrokerUnavailable, match="--nats-creds"):
            async with connect(server.url, "stranger"):
                pass
    finally:
        server.kill()
    files = [file for file in directory.broker_keys.rglob("*") if file.is_file()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


async def test_health_is_asked_over_the_system_account(directory: DataDirectory) -> None:
    """No monitoring port is needed; no answer is no error of the server's."""
    server = EmbeddedServer(directory, mint_accounts(directory, Scale().shards))
    try:
        creds = server.files(UserClass.SYSTEM).creds
        assert creds
        async with connect_health(server.url, creds) as health:
            assert await health.fetch_error() == ""
            server.freeze()
            assert await health.fetch_error() is None
            server.thaw()
    finally:
        server.kill()


def test_a_worker_with_many_models_has_credentials_all_the_same(directory: DataDirectory) -> None:
    """Its token would be too long for all their names."""
    accounts = mint_accounts(directory, Scale().shards)
    few = accounts.add_worker("few", ["mock"]).read_text()
    many = accounts.add_worker("many", [f"model-{number}" for number in range(500)]).read_text()
    assert len(many) < 2 * len(few)
