"""Names as models have them on the Hub are served as they are, by every way in and out."""

import json
from urllib.parse import quote

import pytest

from registry.models import Version, mock_model
from registry.store import Registry
from streams import subjects
from streams.subjects import Lane, Priority
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import QUICK, cell_with_model

NAME = "A" * 30 + "/" + "Ab.C_d-" * 9 + "XX"  # 96 characters, the most that the Hub takes
VERSION = "V" * 128


@pytest.mark.parametrize(("name", "version"), [(NAME, VERSION), ("語" * 85, "本" * 85)])
async def test_the_longest_names_are_served(nats_url: str, name: str, version: str) -> None:
    """Escaped, they are longer than JetStream lets a consumer's name be."""
    made = Version(id=version, options=QUICK)
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


async def test_producers_and_aliases_have_such_names_too(nats_url: str) -> None:
    """A producer writes the name into a subject, an alias into a key of the registry."""
    async with (
        cell_with_model(nats_url, mock_model(NAME, **QUICK)) as gateway,
        connect(nats_url, "producer") as broker,
    ):
        registry = await Registry.open(broker)
        await registry.set_alias(NAME.lower(), NAME)
        answer = await gateway.complete(model=NAME.lower())
        assert answer.status == 200, answer.body
        await registry.close()
        lane = Lane("acme", NAME, Priority.STANDARD)
        subject = subjects.request(lane).replace(".request.", ".submit.")
        heard: list[bytes] = []

        async def collect(msg: object) -> None:
            heard.append(msg.data)  # type: ignore[attr-defined]

        await broker.subscribe("infer.reply.acme.here.>", collect)
        packed = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json", "Route": "here"}
        await broker.store(subject, packed, headers)
        await eventually(lambda: any(b"done" in each for each in heard))
