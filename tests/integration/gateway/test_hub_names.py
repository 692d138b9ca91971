"""Names as models have them on the Hub are served as they are, by every way in and out."""

import json
from urllib.parse import quote

from registry.models import Version, mock_model
from registry.store import Registry
from streams import subjects
from streams.broker.broker_client import connect
from streams.subjects import Lane, Priority
from tests.support.eventually import eventually
from tests.support.gateways import QUICK, cell_with_model

NAME = "A" * 30 + "/" + "Ab.C_d-" * 9 + "XX"  # 96 characters, the most that the Hub takes
VERSION = "V" * 128


async def test_the_longest_name_of_the_hub_is_served(nats_url: str) -> None:
    """Escaped, it is longer than JetStream lets a consumer's name be."""
    version = Version(id=VERSION, options=QUICK)
    update = {"versions": {VERSION: version}, "default_version": VERSION}
    model = mock_model(NAME).model_copy(update=update)
    async with cell_with_model(nats_url, model) as gateway:
        for name in (NAME, f"{NAME}@{VERSION}"):
            answer = await gateway.complete("hello", model=name)
            assert answer.status == 200, answer.body
            assert answer.json["model"] == name
        shown = await gateway.request("GET", "/v1/models/" + quote(NAME, safe=""))
        assert shown.json["id"] == NAME
        async with gateway.socket() as socket:
            await socket.send(type="generate", id="1", model=NAME, prompt="hello", max_tokens=3)
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
