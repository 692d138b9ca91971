"""A broker that is not there, or cannot serve, is told of in one sentence without secrets."""

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from structlog.testing import capture_logs

from registry.store import Registry
from streams.broker import reconnecting_client
from streams.broker.broker_client import Broker
from streams.errors import BrokerMisconfigured, BrokerUnavailable
from tests.support.accounts_server import connect
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.service_process import service_process
from tests.support.services import always

PASSWORD = "p@ss/w,1:%"
JETSTREAM = "jetstream {{ store_dir: {store} }}"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator["Servers"]:
    made = Servers(tmp_path)
    yield made
    for server in made.running:
        server.kill()


class Servers:
    """Starts brokers with a configuration of their own."""

    def __init__(self, home: Path) -> None:
        self._home, self.running = home, list[NatsServer]()

    def start(self, *lines: str, jetstream: str = JETSTREAM) -> str:
        """The URL of a broker with these lines of configuration."""
        store = self._home / "nats"
        store.mkdir()
        configuration = self._home / "nats.conf"
        named = jetstream.format(store=json.dumps(str(store)))
        configuration.write_text("\n".join([named, *lines]))
        self.running.append(NatsServer(store, configuration=configuration))
        return self.running[-1].url


async def refusal(url: str) -> str:
    """Why a process cannot use the broker."""
    with pytest.raises(BrokerMisconfigured) as refused:
        async with connect(url, "test"):
            pass
    return str(refused.value)


async def test_a_broker_without_jetstream_is_named_as_such(servers: Servers) -> None:
    """`ServiceUnavailableError()` after ten seconds would have nobody look at its configuration."""
    assert "JetStream disabled" in await refusal(servers.start(jetstream=""))


@pytest.mark.parametrize("size", [1024, 4096, 65_535])
async def test_a_small_max_payload_is_named(servers: Servers, size: int) -> None:
    """Clients would be told of a limit below nothing."""
    sentence = await refusal(servers.start(f"max_payload: {size}"))
    assert f"max_payload of {size} bytes" in sentence


async def test_a_small_store_is_named_with_what_is_needed(servers: Servers) -> None:
    """In the broker's own words, and before anything is served."""
    limited = "jetstream {{ store_dir: {store}, max_file_store: 20MB, max_memory_store: 20MB }}"
    async with connect(servers.start(jetstream=limited), "test") as broker:
        with pytest.raises(BrokerMisconfigured, match="insufficient storage.*max_file_store"):
            await Registry.open(broker, declares=always)


async def test_a_dead_broker_is_told_of_at_once_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message has the address, the attempt, the reason and the remedy."""
    monkeypatch.setattr(reconnecting_client, "OPEN_SECONDS", 1.0)
    url = f"nats://mill:{quote(PASSWORD, safe='')}@127.0.0.1:{free_port()}"
    address = url.partition("@")[2]
    with capture_logs() as logged, pytest.raises(BrokerUnavailable) as failed:
        await Broker(url, "test").open()
    sentence = f"no connection to NATS at nats://{address} within 1 s: connection refused"
    assert str(failed.value).startswith(sentence)
    assert failed.value.message == "the message broker does not answer at the moment; try again"
    assert [(event["event"], event["reason"]) for event in logged] == [
        ("nats_unreachable", "connection refused")  # once, however often it is tried
    ]
    assert "p%40ss" not in repr(logged) + str(failed.value)


async def test_a_password_with_special_characters_opens_the_door(servers: Servers) -> None:
    """Percent-encoded, as URLs have them; nats-py would send it as it stands there."""
    secret = json.dumps(PASSWORD)
    url = servers.start(f"authorization {{ user: mill, password: {secret} }}")
    given = url.replace("nats://", f"nats://mill:{quote(PASSWORD, safe='')}@")
    async with connect(given, "test") as broker:
        assert await broker.is_responsive(5)
        assert broker.url == url


@pytest.mark.parametrize("service", ["gateway", "dispatcher"])
def test_no_log_has_the_credentials(servers: Servers, tmp_path: Path, service: str) -> None:
    """Logs are read by more people than may enter the broker."""
    url = servers.start("authorization { user: mill, password: other }")
    given = url.replace("nats://", "nats://mill:hunter2@")
    log = tmp_path / "service.log"
    with service_process(service, given, log) as process:
        assert process.process.wait(60) == 1
    text = log.read_text()
    assert "Authorization Violation" in text
    assert "nats_unreachable" in text
    assert "hunter2" not in text
    assert "Traceback" not in text
