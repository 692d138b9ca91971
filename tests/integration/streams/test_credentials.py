"""Credentials of a connection: what is shown to the broker, and what becomes of bad ones."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from streams import topology
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.broker import declaration, reconnecting_client
from streams.connection_files import NO_FILES, ConnectionFiles
from streams.errors import BrokerMisconfigured, BrokerUnavailable
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer
from tests.support.operator_server import OperatorServer

DEAD = "infer.dead.acme.m"
NEVER = 3600.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OperatorServer]:
    store = tmp_path / "operator"
    store.mkdir()
    made = OperatorServer(store)
    yield made
    made.nats.kill()


@pytest.fixture
def short_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server refuses ends the start after two seconds."""
    monkeypatch.setattr(reconnecting_client, "OPEN_SECONDS", 2.0)


def creds(path: Path) -> ConnectionFiles:
    return ConnectionFiles(creds=path)


async def refusal(url: str, files: ConnectionFiles = NO_FILES) -> str:
    """The sentence with which a first connection ends."""
    with pytest.raises((BrokerUnavailable, BrokerMisconfigured)) as caught:
        async with connect(url, "test", files):
            pass
    return str(caught.value)


async def test_a_credentials_file_opens_the_broker(server: OperatorServer, tmp_path: Path) -> None:
    path = server.write(tmp_path / "a.creds")
    async with connect(server.url, "test", creds(path)) as broker:
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        assert (await broker.store(DEAD, b"x")).seq
        assert await broker.read(topology.DEAD, {"last_by_subj": DEAD})


async def test_a_seed_alone_opens_a_broker_that_lists_the_key(tmp_path: Path) -> None:
    key = KeyPair.generate(KeyKind.USER)
    path, configuration = tmp_path / "user.nk", tmp_path / "server.conf"
    path.write_text(f"{key.seed}\n")
    configuration.write_text(
        f'jetstream {{ store_dir: "{tmp_path}" }}\n'
        f"authorization {{ users: [ {{ nkey: {key.public} }} ] }}"
    )
    server = NatsServer(tmp_path, configuration=configuration)
    try:
        async with connect(server.url, "test", ConnectionFiles(nkey=path)) as broker:
            assert broker.is_connected
        key = KeyPair.generate(KeyKind.USER)
        path.write_text(key.seed)
        assert f"does not know the user of {path}" in await refusal(
            server.url, ConnectionFiles(nkey=path)
        )
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("allowed", "prefix"),
    [
        (["_INBOX.other.>", "news"], "_INBOX.other."),
        (["_INBOX.>"], "_INBOX.somebody."),
        (None, "_INBOX.somebody."),
    ],
)
async def test_replies_come_to_where_the_user_may_listen(
    server: OperatorServer, tmp_path: Path, allowed: list[str] | None, prefix: str
) -> None:
    """Else one user would read the answers to others."""
    user = server.issue("somebody", sub={"allow": allowed} if allowed else {})
    path = server.write(tmp_path / "a.creds", user)
    async with connect(server.url, "process", creds(path)) as broker:
        assert await broker.client.request("$JS.API.INFO", timeout=9)
        assert broker.client.new_inbox().startswith(prefix)


async def test_replies_to_a_process_without_a_token_bear_its_name(nats_url: str) -> None:
    """A server's own configuration can name them for each user."""
    async with connect(nats_url, "process") as broker:
        assert broker.client.new_inbox().startswith("_INBOX.process.")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("", "are malformed"),
        ("-----BEGIN NATS USER JWT-----\nx\n------END NATS USER JWT------\n", "are malformed"),
    ],
)
async def test_a_file_without_credentials_ends_the_start_at_once(
    server: OperatorServer, tmp_path: Path, content: str | None, reason: str
) -> None:
    """No time heals it; the sentence names the file and what to do."""
    path = tmp_path / "a.creds"
    if content is not None:
        path.write_text(content)
    said = await refusal(server.url, creds(path))
    assert f"the NATS credentials in {path} {reason}" in said
    assert "millstream broker user" in said


async def test_expired_credentials_end_the_start_at_once(
    server: OperatorServer, tmp_path: Path
) -> None:
    path = server.write(tmp_path / "a.creds", server.issue(seconds=-60))
    assert f"the NATS credentials in {path} expired at " in await refusal(server.url, creds(path))


async def test_a_token_and_a_seed_of_two_users_end_the_start_at_once(
    server: OperatorServer, tmp_path: Path
) -> None:
    one, other = server.issue(), server.issue()
    path = tmp_path / "a.creds"
    path.write_text(one.text().replace(one.key.seed, other.key.seed))
    said = await refusal(server.url, creds(path))
    assert "are foreign" in said
    assert other.key.seed not in said


async def test_credentials_of_another_server_end_the_start_with_what_to_do(
    server: OperatorServer, tmp_path: Path, short_opening: None
) -> None:
    """The server says no more than that it lets nobody in."""
    store = tmp_path / "other"
    store.mkdir()
    other = OperatorServer(store)
    other.nats.kill()
    path = other.write(tmp_path / "a.creds")
    with capture_logs() as events:
        said = await refusal(server.url, creds(path))
    assert "Authorization Violation; the server does not know the user of" in said
    assert str(path) in said
    (told,) = [each for each in events if each["event"] == "nats_unreachable"]
    assert str(path) in told["remedy"]


async def test_a_server_that_wants_credentials_says_so(
    server: OperatorServer, short_opening: None
) -> None:
    assert "give the credentials that the server wants, with --nats-creds" in await refusal(
        server.url
    )


async def test_credentials_in_url_and_file_are_refused(tmp_path: Path) -> None:
    """One of them would be used, and nobody would know which."""
    said = await refusal("nats://user:secret@127.0.0.1:1", creds(tmp_path / "a.creds"))
    assert "give one of them" in said
    assert "secret" not in said


async def test_a_user_that_is_cut_comes_back_by_the_next_file(
    server: OperatorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py closes for good. The reason names the file; nothing of its content is told."""
    monkeypatch.setattr(reconnecting_client, "FILE_CHECK_SECONDS", NEVER)
    monkeypatch.setattr(reconnecting_client, "OPEN_SECONDS", 1.0)
    user, path = server.issue(), tmp_path / "a.creds"
    server.write(path, user)
    heard = asyncio.Event()

    async def on_message(_: Msg) -> None:
        heard.set()

    with capture_logs() as events:
        async with connect(server.url, "test", creds(path)) as broker:
            await broker.subscribe("news", on_message)
            await server.revoke(user)
            await eventually(lambda: [e for e in events if e["event"] == "nats_not_rebuilt"])
            server.write(path)
            await eventually(lambda: broker.is_connected)
            await broker.publish("news")
            await heard.wait()
            await eventually(lambda: [e for e in events if e["event"] == "nats_reconnected"])
    (closed,) = [each for each in events if each["event"] == "nats_closed"]
    assert str(path) in closed["remedy"]
    assert user.key.seed not in str(events)
    assert user.token not in str(events)


async def test_a_token_that_ends_is_told_of_and_its_successor_taken_up(
    server: OperatorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It expires while connected; whoever reads the log has known it before."""
    monkeypatch.setattr(reconnecting_client, "FILE_CHECK_SECONDS", 0.05)
    path = server.write(tmp_path / "a.creds", server.issue(seconds=5))
    with capture_logs() as events:
        async with connect(server.url, "test", creds(path)) as broker:
            first = broker.client
            await eventually(lambda: not broker.is_connected)
            server.write(path)
            await eventually(lambda: broker.is_connected)
            assert broker.client is not first
    (soon,) = [each for each in events if each["event"] == "nats_credentials_expire_soon"]
    assert soon["file"] == str(path)
    (closed,) = [each for each in events if each["event"] == "nats_closed"]
    assert "expired" in closed["reason"].lower()


async def test_a_file_is_read_again_when_the_server_comes_back(
    server: OperatorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py reconnects by itself then, without a new client."""
    monkeypatch.setattr(reconnecting_client, "FILE_CHECK_SECONDS", NEVER)
    path = server.write(tmp_path / "a.creds")
    async with connect(server.url, "test", creds(path)) as broker:
        client, before = broker.client, broker.client.identity
        server.nats.kill()
        path.write_text("half of a file")
        await eventually(lambda: not broker.is_connected)
        server.nats.start()
        second = server.issue()
        server.write(path, second)
        await eventually(lambda: broker.is_connected)
        assert broker.client is client
        identity = broker.client.identity
        assert identity
        assert identity is not before
        assert identity.key.public == second.user


async def test_a_half_written_file_leaves_the_connection_as_it_is(
    server: OperatorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever rotates by hand writes in place."""
    monkeypatch.setattr(reconnecting_client, "FILE_CHECK_SECONDS", 0.02)
    path = server.write(tmp_path / "a.creds")
    with capture_logs() as events:
        async with connect(server.url, "test", creds(path)) as broker:
            first = broker.client
            path.write_text("half")
            await eventually(lambda: [e for e in events if e["event"] == "nats_not_renewed"])
            assert broker.client is first
            assert broker.is_connected
            server.write(path)
            await eventually(lambda: broker.client is not first)
            assert broker.is_connected
    assert [e["event"] for e in events].count("nats_not_renewed") == 1
