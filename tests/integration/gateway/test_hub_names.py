"""Names as models have them on the Hub are served as they are, by every way in and out."""

import json
from urllib.parse import quote

import pytest
from nats.aio.msg import Msg

from registry.models import mock_model
from registry.store import Registry
from streams import subjects
from streams.subjects import Lane, Priority
from tests.support.accounts_server import connect, producer_client
from tests.support.eventually import eventually
from tests.support.gateways import QUICK, RunningGateway, cell_with_model
from tests.support.versions import make_version

NAME = "A" * 30 + "/" + "Ab.C_d-" * 9 + "XX"  # 96 characters, the most that the Hub takes
VERSION = "V" * 128


@pytest.mark.parametrize(("name", "version"), [(NAME, VERSION), ("語" * 85, "本" * 85)])
async def test_the_longest_names_are_served(nats_url: str, name: str, version: str) -> None:
    """Escaped, they are longer than JetStream lets a consumer's name be."""
    made = make_version(version, options=QUICK)
    update = {"versions": {version: made}, "default_version": version}
    model = mock_model(name).model_copy(update=update)
    async with cell_with_model(nats_url, model) as gateway:
        for asked in (name, f"{name}@{version}"):
            answer = await gateway.complete("hello", model=asked)
            assert answer.status == 200, answer.body
            assert answer.json["model"] == asked
        shown = await gateway.request("GET", "/v1/models/" + quote(name, safe=""))
        assert shown.json["id"] == name
        async with gateway.socket() as socket:
            await socket.send(type="generate", id="1", model=name, prompt="hello", max_tokens=3)
            assert (await socket.receive_rest("1"))[-1]["type"] == "done"


async def is_served(gateway: RunningGateway, model: str) -> bool:
    return (await gateway.complete(model=model)).status == 200


async def test_producers_and_aliases_have_such_names_too(nats_url: str) -> None:
    """A producer writes the name into a subject, an alias into a key of the registry."""
    async with (
        cell_with_model(nats_url, mock_model(NAME, **QUICK)) as gateway,
        connect(nats_url, "test") as broker,
        producer_client(nats_url) as producer,
    ):
        registry = await Registry.open(broker)
        await registry.set_alias(NAME.lower(), NAME)
        await eventually(lambda: is_served(gateway, NAME.lower()))
        await registry.close()
        lane = Lane("acme", NAME, Priority.STANDARD)
        subject = subjects.request(lane).replace(".request.", ".submit.")
        heard: list[bytes] = []

        async def collect(msg: Msg) -> None:
            heard.append(msg.data)

        await producer.subscribe("infer.reply.acme.here.>", cb=collect)
        packed = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json", "Route": "here"}
        await producer.jetstream().publish(subject, packed, headers=headers)
        await eventually(lambda: any(b"done" in each for each in heard))
