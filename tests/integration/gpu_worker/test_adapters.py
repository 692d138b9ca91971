"""`base:adapter` from every door, through dispatcher and worker, with a real model's weights."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgpack
import nats
from nats.aio.msg import Msg

import dispatcher.service
import gpu_worker.service
from registry.lora_inspection import adapter_from
from registry.model_inspection import model_from
from registry.store import Registry
from streams import messages, subjects, topology
from streams.messages import AdapterRef, LedgerRecord
from tests.engine import lora_adapters, tiny_models
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway, gateways, text_of
from tests.support.services import always, dispatcher_settings, running, worker_settings

PROMPT = tiny_models.prompt(1, 20)
COUNT = 12


class Cell:
    """A gateway over a tiny model, and the adapters that it has, by name."""

    def __init__(
        self, gateway: RunningGateway, nats_url: str, adapters: dict[str, AdapterRef]
    ) -> None:
        self.gateway, self.nats_url, self.adapters = gateway, nats_url, adapters

    async def text(self, model: str) -> str:
        answer = await self.gateway.complete(PROMPT, model=model, max_tokens=COUNT, temperature=0)
        assert answer.status == 200, answer.body
        return answer.text

    def expected(self, name: str = "") -> str:
        """What the engine says by itself, which is what peft says."""
        adapter = self.adapters.get(name)
        return tiny_models.run_to_end(
            tiny_models.engine(), [lora_adapters.greedy_sequence("r", PROMPT, COUNT, adapter)]
        ).text["r"]

    async def ledger(self) -> list[str]:
        """The adapters of all ended requests."""
        async with connect(self.nats_url, "test") as broker:
            stored = await broker.read_subject(topology.LEDGER, "infer.ledger.>")
        records = [messages.from_wire(LedgerRecord, messages.unpack(m.data)) for m in stored]
        return sorted(record.adapter for record in records)


def save_model(directory: Path) -> Path:
    tiny_models.model("llama").save_pretrained(directory)
    tiny_models.tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@asynccontextmanager
async def cell(nats_url: str, path: Path) -> AsyncIterator[Cell]:
    """Everything behind one gateway: the model `base`, alias `chat`, two adapters."""
    adapters = await register(nats_url, path)
    worker = worker_settings(
        nats_url, model=("base",), kv_tokens=2048, max_sequences=8, max_batch_tokens=64
    )
    async with (
        gateways(nats_url) as (gateway,),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker),
    ):
        await eventually(gateway.is_ready)
        yield Cell(gateway, nats_url, adapters)


async def register(nats_url: str, path: Path) -> dict[str, AdapterRef]:
    model = model_from(save_model(path / "base"), "base", "v1")
    async with connect(nats_url, "test") as broker:
        registry = await Registry.open(broker, declares=always)
        await registry.add_model(model)
        await registry.set_alias("chat", "base")
        made = [
            adapter_from(
                lora_adapters.save_adapter(path / name, "llama", rank, rank),
                name,
                model,
                model.default,
            )
            for name, rank in (("small", 2), ("large", 8))
        ]
        for adapter in made:
            await registry.add_adapter(adapter)
        await registry.close()
    return {adapter.name: adapter.ref for adapter in made}


async def test_an_adapter_is_asked_for_by_name_at_every_door(nats_url: str, tmp_path: Path) -> None:
    """HTTP, WebSocket and NATS producers; side by side with the model itself and with another."""
    async with cell(nats_url, tmp_path) as made:
        asked = ["base", "base:small", "base@v1:large", "chat:large"]
        said = await asyncio.gather(*(made.text(name) for name in asked))
        small, large = made.expected("small"), made.expected("large")
        assert said == [made.expected(), small, large, large]
        assert len(set(said)) == 3
        async with made.gateway.socket() as socket:
            await socket.send(
                type="generate",
                id="a",
                model="base:small",
                prompt=PROMPT,
                max_tokens=COUNT,
                temperature=0,
            )
            assert text_of(await socket.receive_rest("a")) == small
        assert await produced(nats_url, "base:large") == large
        assert await made.ledger() == ["", "large", "large", "large", "small", "small"]


async def produced(nats_url: str, model: str) -> str:
    """What a producer gets."""
    client = await nats.connect(nats_url)
    records: list[dict[str, str]] = []

    async def on_reply(msg: Msg) -> None:
        records.append(msgpack.unpackb(msg.data))

    await client.subscribe("infer.reply.acme.bar.>", cb=on_reply)
    body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    subject = f"infer.submit.acme.{subjects.escape(model)}.standard"
    await client.jetstream().publish(subject, json.dumps(body).encode(), headers={"Route": "bar"})
    await eventually(lambda: bool(records) and records[-1]["type"] == "done")
    await client.close()
    return "".join(record["text"] for record in records if record["type"] == "chunk")


async def test_adapters_are_listed_with_their_model(nats_url: str, tmp_path: Path) -> None:
    """As vLLM lists them: an entry each, whose `parent` is the model."""
    await register(nats_url, tmp_path)
    async with gateways(nats_url) as (gateway,):
        listed = (await gateway.request("GET", "/v1/models")).json["data"]
        parents = {card["id"]: card.get("parent") for card in listed}
        assert parents == {"base": None, "base:large": "base", "base:small": "base", "chat": None}
        shown = (await gateway.request("GET", "/v1/models/chat:small")).json
        assert (shown["id"], shown["parent"]) == ("chat:small", "base")


async def test_an_unknown_adapter_is_an_unknown_model(nats_url: str, tmp_path: Path) -> None:
    """The model itself must not answer in its place."""
    await register(nats_url, tmp_path)
    async with gateways(nats_url) as (gateway,):
        for name in ("base:nope", "base@v2:small", "nope:small", "base:", ":small"):
            answer = await gateway.complete(model=name)
            assert (answer.status, answer.error["code"]) == (404, "model_not_found"), name


async def test_a_damaged_adapter_fails_its_own_requests(nats_url: str, tmp_path: Path) -> None:
    """The code says whose fault it is, and everybody else is served."""
    async with cell(nats_url, tmp_path) as made:
        weights = tmp_path / "small" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        failing = made.gateway.complete(PROMPT, model="base:small", max_tokens=COUNT)
        answer, said = await asyncio.gather(failing, made.text("base:large"))
        assert (answer.status, answer.error["code"]) == (500, "adapter_failed")
        assert "adapter_model.safetensors: has sha256" in answer.error["message"]
        assert said == made.expected("large")
