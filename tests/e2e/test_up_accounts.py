"""`millstream up` lets nobody into its broker but those whom it has given credentials."""

import json
import shutil
import signal
import stat
from pathlib import Path

import pytest

from streams.accounts.access import UserClass
from streams.broker import declaration, reconnecting_client
from streams.errors import BrokerUnavailable
from streams.topology import LEDGER, Scale
from tests.support.accounts_server import connect
from tests.support.millstream_up import MillstreamUp, run_millstream
from tests.support.nats_server import NatsServer

MOCK = ("--model", "mock", "--mock-ttft-ms", "5", "--mock-itl-ms", "2")
LEDGER_SUBJECT = "infer.ledger.acme.mock"


async def read_ledger(up: MillstreamUp) -> list[bytes]:
    async with connect(up.nats_url, "test", up.files(UserClass.OPERATOR)) as broker:
        return [m.data for m in await broker.read_subject(LEDGER, LEDGER_SUBJECT)]


async def test_a_stranger_on_this_machine_is_not_let_in(
    mock_up: MillstreamUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reaches the port would read all prompts; the keys are files of their owner alone."""
    monkeypatch.setattr(reconnecting_client, "OPEN_SECONDS", 1.0)
    with pytest.raises(BrokerUnavailable, match="--nats-creds"):
        async with connect(mock_up.nats_url, "stranger"):
            pass
    files = [file for file in (mock_up.home / "data/broker").rglob("*") if file.is_file()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_commands_find_credentials_beside_the_server(mock_up: MillstreamUp, tmp_path: Path) -> None:
    """What is in the environment is another cell's."""
    words = ("lag", "--json", "--data-dir", str(mock_up.home / "data"))
    found = run_millstream(*words, MILLSTREAM_NATS_CREDS=str(tmp_path / "another-cells.creds"))
    assert json.loads(found.stdout)["workers"]


async def test_what_was_stored_before_accounts_is_moved_at_the_start(tmp_path: Path) -> None:
    """It says so in one line; further starts keep everything, and lost keys stop one."""
    store = tmp_path / "data/nats"
    store.mkdir(parents=True)
    before = NatsServer(store)
    async with connect(before.url) as broker:
        await declaration.declare(broker, Scale(), 100)
        await broker.store(LEDGER_SUBJECT, b"kept")
    before.process.send_signal(signal.SIGTERM)
    before.process.wait()
    for start in range(2):
        with MillstreamUp(tmp_path, *MOCK) as up:
            assert await read_ledger(up.wait_until_ready()) == [b"kept"]
            moves = up.output.read_text().count("streams_moved_to_accounts")
            assert moves == (1 if start == 0 else 0)
            assert up.stop() == 0
    shutil.move(tmp_path / "data/broker", tmp_path / "copy")
    with MillstreamUp(tmp_path, *MOCK) as up:
        assert up.process.wait(60) == 1
        said = up.output.read_text()
        assert f"whose keys are not in {tmp_path}/data/broker: bring that folder back" in said
        assert said.startswith("millstream: streams in ")
