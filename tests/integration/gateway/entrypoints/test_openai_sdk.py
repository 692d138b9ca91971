"""What clients and operators rely on: OpenAI's SDK, headers, the OpenAPI document, metrics."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, cell, text_of, token_indices

QUICK = {"ttft_ms": 1, "itl_ms": 1}


def sdk(gateway: RunningGateway, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


async def test_the_openai_sdk_completes_and_chats(nats_url: str) -> None:
    """Whole and streamed, with usage and log probabilities."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        completion = await client.completions.create(model="mock", prompt="hi", max_tokens=9)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 9
        assert completion.choices[0].finish_reason == "length"
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(
            model="mock", messages=messages, max_tokens=9, seed=1, logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].logprobs is not None
        assert len(chat.choices[0].logprobs.content or []) == 9
        stream = await client.chat.completions.create(
            model="mock",
            messages=messages,
            max_tokens=9,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(deltas) == chat.choices[0].message.content
        assert chunks[-1].usage == chat.usage


async def test_the_openai_sdk_embeds_and_lists(nats_url: str) -> None:
    """Floats over the wire or base64: the same numbers."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        texts = ["one", "another"]
        embedded = await client.embeddings.create(model="vectors", input=texts)
        floats = await client.embeddings.create(
            model="vectors", input=texts, encoding_format="float"
        )
        assert [len(e.embedding) for e in embedded.data] == [8, 8]
        assert [e.embedding for e in embedded.data] == [e.embedding for e in floats.data]
        assert [model.id async for model in client.models.list()] == ["mock", "vectors"]
        assert (await client.models.retrieve("mock")).id == "mock"


async def test_many_embeddings_come_in_pieces(nats_url: str) -> None:
    """The event loop serves others between them; put together they are one answer."""
    async with cell(nats_url) as (gateway,):
        asked = {"model": "vectors", "input": [f"input {n}" for n in range(1000)]}
        answer = await gateway.request("POST", "/v1/embeddings", asked)
        assert answer.headers["transfer-encoding"] == "chunked"
        assert [item["index"] for item in answer.json["data"]] == list(range(1000))
        short = await gateway.request(
            "POST", "/v1/embeddings", {"model": "vectors", "input": "one"}
        )
        assert "content-length" in short.headers


async def test_the_openai_sdk_knows_our_errors(nats_url: str) -> None:
    """Its exceptions are by status, so these must be the right ones."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        with pytest.raises(openai.NotFoundError) as absent:
            await client.completions.create(model="absent", prompt="x")
        assert absent.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="mock", prompt="x" * 9000)
        assert long.value.code == "context_length_exceeded"
        async with sdk(gateway, "sk-nope") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_embeddings_come_over_the_socket(nats_url: str) -> None:
    """One frame with all vectors, in the order of the inputs."""
    async with cell(nats_url) as (gateway,), gateway.socket() as socket:
        await socket.send(type="embed", id="a", model="vectors", input=["x", "y", "x"])
        *_, result = await socket.receive_rest("a")
        assert [item["index"] for item in result["data"]] == [0, 1, 2]
        first, second, third = (item["embedding"] for item in result["data"])
        assert first == third != second
        assert result["usage"]["prompt_tokens"] == 3
        assert result["timing"]["total"] >= 0


async def test_an_answer_tells_its_id_and_where_its_time_went(nats_url: str) -> None:
    """Whoever asks why it was slow needs both."""
    async with cell(nats_url) as (gateway,), gateway.socket() as socket:
        answer = await gateway.complete()
        stages = [part.split(";")[0] for part in answer.headers["server-timing"].split(", ")]
        assert stages == ["admit", "queue", "dispatch", "prefill", "decode", "total"]
        assert answer.json["id"].endswith(answer.headers["x-request-id"])
        streamed = await gateway.complete(stream=True)
        assert streamed.headers["server-timing"].startswith("admit;dur=")
        assert streamed.headers["x-request-id"] in streamed.events[0]["id"]
        await socket.generate("a", max_tokens=2)
        assert list((await socket.receive_rest("a"))[-1]["timing"]) == stages


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    if isinstance(node, list):
        for value in node:
            yield from references(value)


async def test_the_openapi_document_is_whole(nats_url: str) -> None:
    """Every reference leads somewhere, and every path is served."""
    async with cell(nats_url) as (gateway,):
        document = (await gateway.request("GET", "/openapi.json", key=None)).json
        found = set(references(document))
        assert found
        for reference in found:
            node = document
            for name in reference.removeprefix("#/").split("/"):
                node = node[name]
            assert "type" in node or "properties" in node or "enum" in node
        assert document["openapi"].startswith("3.1")
        for path, methods in document["paths"].items():
            for method in methods:
                answer = await gateway.request(
                    method.upper(), path.replace("{model}", "mock"), key=None
                )
                assert answer.status in (200, 401)


async def metrics(gateway: RunningGateway) -> dict[str, Any]:
    text = (await gateway.request("GET", "/metrics", key=None)).body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


async def test_metrics_have_bounded_labels(nats_url: str) -> None:
    """A stranger cannot make a label: no model that is not registered, no code of its own."""
    async with cell(nats_url) as (gateway,), gateway.socket() as socket:
        for i in range(30):
            assert (await gateway.complete(model=f"made-up-{i}")).status == 404
            await socket.send(type="generate", id="x", model=f"invented-{i}", prompt="x")
            assert (await socket.receive_rest("x"))[-1]["code"] == "model_not_found"
        await gateway.complete(model="mock@1")
        found = await metrics(gateway)
        assert "millstream_time_to_first_token_seconds" in found
        ours = [family for name, family in found.items() if name.startswith("millstream_")]
        labels = {
            value
            for family in ours
            for sample in family.samples
            for name, value in sample.labels.items()
            if name == "model"
        }
        assert {"mock"} <= labels
        assert not {label for label in labels if label.startswith(("made-up", "invented"))}


async def test_nothing_is_left_of_many_requests(nats_url: str) -> None:
    """Two hundred over HTTP and WebSocket, with resumes and cancels: no following stays behind."""
    async with cell(nats_url, mock=QUICK) as (gateway,), gateway.socket() as socket:
        frames: list[dict[str, Any]] = []
        for wave in range(0, 160, 20):
            for i in range(wave, wave + 20):
                await socket.generate(str(i), f"p{i}", max_tokens=3, idempotency_key=str(i % 120))
            answers = await asyncio.gather(*(gateway.complete(max_tokens=3) for _ in range(5)))
            assert {answer.status for answer in answers} == {200}
            while sum(frame["type"] in ("done", "error") for frame in frames) < wave + 20:
                frames.append(await socket.receive())
        conflicts = [frame for frame in frames if frame["type"] == "error"]
        assert {frame["code"] for frame in conflicts} == {"idempotency_conflict"}
        assert len(conflicts) == 40
        for frame in frames[:50]:
            if frame["type"] == "accepted":
                again = {"type": "resume", "id": "r", "request_id": frame["request_id"]}
                await socket.send(**again, after=-1)
                resumed = await socket.receive_rest("r")
                assert token_indices(resumed) == [0, 1, 2]
                assert text_of(resumed)
        await eventually(lambda: nothing_followed(gateway))


async def nothing_followed(gateway: RunningGateway) -> bool:
    return await gateway.followed_requests() == 0
