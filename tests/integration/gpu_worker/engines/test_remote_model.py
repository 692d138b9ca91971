"""A remote model through all of Millstream: the server may fail, its clients do not see it."""

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import dispatcher.service
import gpu_worker.service
from registry.models import Model
from registry.remote_models import RemoteServer, remote_model
from registry.store import Registry
from streams import topology
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, cell, cell_with_model
from tests.support.services import (
    BrokerClient,
    broker_client_of,
    dispatcher_settings,
    running,
    worker_settings,
)
from tests.support.stub_upstream import (
    ANSWER,
    PROMPT,
    UpstreamCall,
    break_after,
    hang_in_stream,
    respond_json,
    respond_status,
    running_upstream,
    split_words,
    stream_answer,
)
from tests.support.tiny_model_server import TinyModelServer, pieces_tokenizer

QUICK = {"retry_seconds": 0.01, "cooldown_seconds": 0.05}


def model_of(
    url: str,
    name: str = "corn",
    task: Any = "generate",
    tokenizer: Path | None = None,
    **server: Any,
) -> Model:
    """A remote model that is tried again sooner than an operator would want."""
    options = {"model": "corn", "chunk_seconds": 0.5, **server}
    made = remote_model(
        RemoteServer(url=url, **options), name, task=task, tokenizer=tokenizer, context=1000
    )
    version = made.default.model_copy(update={"options": {**made.default.options, **QUICK}})
    return made.model_copy(update={"versions": {version.id: version}})


@asynccontextmanager
async def behind(nats_url: str, model: Model) -> AsyncIterator[BrokerClient]:
    """Dispatcher and worker of a remote model, and a client of it."""
    async with (
        broker_client_of(nats_url, model) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(
            gpu_worker.service, worker_settings(nats_url, model=(model.name,), beat_seconds=0.1)
        ),
    ):
        await eventually(lambda: c.report(model.name))
        yield c


async def ask(c: BrokerClient, **options: Any) -> str:
    return await c.send(PROMPT, model="corn", **{"max_tokens": 100, **options})


def indices(c: BrokerClient, request: str) -> list[int]:
    chunks = [record for record in c.records[request] if record["type"] == "chunk"]
    return [i for chunk in chunks for i in range(chunk["index"], chunk["index"] + chunk["count"])]


async def test_through_a_flaky_server_every_request_ends_once_and_whole(nats_url: str) -> None:
    """It refuses, resets, falls silent in the middle; clients see each word once, in order."""
    chance = random.Random(3)
    ways = [
        stream_answer,
        stream_answer,
        stream_answer,
        respond_status(500),
        respond_status(503),
        respond_status(429, retry_after="0"),
        UpstreamCall.reset,
    ]
    ways += [break_after(2), break_after(5, lambda call: None), break_after(1, hang_in_stream)]

    def flaky(call: UpstreamCall) -> None:
        chance.choice(ways)(call)

    with running_upstream(flaky) as server:
        # a call that only awaits the end may fall silent at once, before its first event
        model = model_of(server.url, first_seconds=2)
        async with behind(nats_url, model) as c:
            requests = [await ask(c) for _ in range(16)]
            await eventually(lambda: all(c.terminal(request) for request in requests))
            served = [request for request in requests if c.record_counts(request)["done"]]
            for request in served:
                assert c.text(request) == ANSWER
                assert indices(c, request) == [*range(len(split_words(ANSWER)))]
            for request in requests:
                assert ANSWER.startswith(c.text(request))
                assert c.record_counts(request)["done"] + c.record_counts(request)["error"] == 1
            assert len(served) > len(requests) / 2
            assert len(server.calls) > len(requests)
            await eventually(c.is_idle)
            assert await c.ledger_counts() == dict.fromkeys(requests, 1)


async def test_while_the_server_is_away_requests_wait_in_the_queue(nats_url: str) -> None:
    """The breaker opens, no credit is announced; at the deadline or when it is back they end."""
    with running_upstream(stream_answer) as gone:
        port = gone.server_port
    async with behind(nats_url, model_of(f"http://127.0.0.1:{port}")) as c:
        hurried = await ask(c, deadline_seconds=2)

        async def no_credit() -> bool:
            report = await c.report("corn")
            free = [worker["free_sequences"] for worker in report["workers"]] if report else []
            return free == [0]

        await eventually(no_credit)
        patient = [await ask(c) for _ in range(20)]
        terminal = await eventually(lambda: c.terminal(hurried))
        assert terminal["code"] == "deadline_exceeded"
        assert await c.message_count(topology.REQUESTS) >= 10
        assert not any(c.terminal(request) for request in patient)
        with running_upstream(stream_answer, port=port):
            await eventually(lambda: all(c.terminal(request) for request in patient))
        assert {c.text(request) for request in patient} == {ANSWER}


async def test_another_worker_continues_behind_the_stored_text(nats_url: str) -> None:
    """A drained worker gives back a request that is half done."""
    with running_upstream(break_after(4, hang_in_stream), stream_answer) as server:
        model = model_of(server.url, chunk_seconds=60)
        worker = worker_settings(nats_url, model=("corn",), id="w1", drain_seconds=0)
        async with (
            broker_client_of(nats_url, model) as c,
            running(dispatcher.service, dispatcher_settings(nats_url)),
        ):
            async with running(gpu_worker.service, worker):
                request = await ask(c)
                await eventually(lambda: request in c.records and c.tokens(request))
            async with running(
                gpu_worker.service, worker_settings(nats_url, model=("corn",), id="w2")
            ):
                await eventually(lambda: c.terminal(request))
        assert c.attempts(request) == [1, 2]
        assert c.text(request) == ANSWER
        assert indices(c, request) == [*range(len(split_words(ANSWER)))]


RESUMED: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "mill", "schema": {"type": "object"}},
        }
    },
    "json_object": {"response_format": {"type": "json_object"}},
    "presence": {"presence_penalty": 0.4},
    "frequency": {"frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.5},
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("tokens_known", [True, False])
async def test_answers_with_grammars_and_penalties_are_whole_over_breaks(
    nats_url: str, tmp_path: Path, name: str, tokens_known: bool
) -> None:
    """In chats and completions, streamed or not: the answer of an undisturbed server."""
    files = tmp_path / "tokenizer"
    files.mkdir()
    pieces_tokenizer().save(str(files / "tokenizer.json"))
    served: dict[str, Any] = {"api": "vllm", "tokenizer": files} if tokens_known else {}
    tiny = TinyModelServer(counts_prompt=tokens_known)
    with running_upstream(tiny) as server:
        model = model_of(server.url, **served)
        async with cell_with_model(nats_url, model) as gateway:
            for chat in (True, False):
                body = {"model": "corn", "max_tokens": 50, "temperature": 0, **RESUMED[name]}
                body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {}
                body |= {} if chat else {"prompt": PROMPT}
                path = "/v1/chat/completions" if chat else "/v1/completions"
                whole = (await gateway.request("POST", path, body)).json["choices"]
                for stream in (False, True):
                    tiny.breaks.extend([2, 4])
                    answer = await gateway.request("POST", path, {**body, "stream": stream})
                    assert not tiny.breaks
                    if stream:
                        assert _streamed_text(answer.events) == _text_of(whole[0])
                    else:
                        assert answer.json["choices"] == whole
                if "response_format" in body:
                    assert set(json.loads(_text_of(whole[0]))) == {"wheels", "stones"}


def _text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _streamed_text(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        each.get("text") or each.get("delta", {}).get("content") or "" for each in choices
    )


@pytest.mark.parametrize("ignores_seed", [False, True])
async def test_another_worker_replays_a_document_or_says_that_it_cannot(
    nats_url: str, ignores_seed: bool
) -> None:
    """Half of a document is stored when the worker goes; no second one follows it."""
    tiny = TinyModelServer([3], ignores_seed=ignores_seed)
    calls = iter([True])

    def hangs_once(call: UpstreamCall) -> None:
        tiny(call)
        if next(calls, False):
            hang_in_stream(call)

    grammar = {"kind": "json_schema", "source": '{"type": "object"}'}
    with running_upstream(hangs_once) as server:
        model = model_of(server.url, chunk_seconds=60)
        first = worker_settings(nats_url, model=("corn",), id="w1", drain_seconds=0)
        async with (
            broker_client_of(nats_url, model) as c,
            running(dispatcher.service, dispatcher_settings(nats_url)),
        ):
            async with running(gpu_worker.service, first):
                request = await ask(c, grammar=grammar, temperature=1.0, seed=1)
                await eventually(lambda: request in c.records and "12" in c.text(request))
            async with running(
                gpu_worker.service, worker_settings(nats_url, model=("corn",), id="w2")
            ):
                terminal = await eventually(lambda: c.terminal(request))
        assert c.attempts(request) == [1, 2]
    if ignores_seed:
        assert terminal["code"] == "upstream_failed"
        assert "cannot be continued exactly" in terminal["message"]
        assert c.text(request) == '{"wheels": 12'
    else:
        assert terminal["type"] == "done"
        assert set(json.loads(c.text(request))) == {"wheels", "stones"}
        assert indices(c, request) == [*range(7)]


async def test_a_refusal_ends_the_request_with_the_servers_reason(nats_url: str) -> None:
    """Once, with its own code."""
    with running_upstream(respond_status(422, {"detail": "no corn"})) as server:
        async with behind(nats_url, model_of(server.url)) as c:
            request = await ask(c)
            terminal = await eventually(lambda: c.terminal(request))
    assert terminal["code"] == "upstream_refused"
    assert "no corn" in terminal["message"]
    assert len(server.calls) == 1


async def test_usage_is_the_servers_count(nats_url: str) -> None:
    """Ours is an estimate where the model has no tokeniser here; the ledger has theirs, too."""
    with running_upstream(stream_answer) as server:
        async with behind(nats_url, model_of(server.url)) as c:
            request = await ask(c)
            terminal = await eventually(lambda: c.terminal(request))
    assert terminal["usage"]["prompt_tokens"] == len(split_words(PROMPT))
    assert terminal["usage"]["completion_tokens"] == len(split_words(ANSWER))


async def test_a_model_without_tokenizer_takes_texts_alone(nats_url: str) -> None:
    """What its token ids mean is not known here; a guess would be another prompt."""
    with running_upstream(stream_answer) as server:
        async with cell_with_model(nats_url, model_of(server.url)) as gateway:
            good = await gateway.complete(PROMPT, model="corn", max_tokens=50)
            bad = await gateway.complete([1, 2, 3], model="corn")
    assert good.text == ANSWER
    assert (bad.status, bad.error["code"]) == (400, "unsupported_value")
    assert "tokenizer" in bad.error["message"]


async def test_a_single_item_api_serves_embeddings(nats_url: str) -> None:
    """One call per input, one answer with all of them."""
    row = respond_json(lambda body: [float(len(body["inputs"])), 1.0])
    with running_upstream(row) as server:
        model = model_of(server.url, task="embed", api="single")
        async with cell_with_model(nats_url, model) as gateway:
            body = {"model": "corn", "input": ["a", "bb", "ccc"]}
            answer = await gateway.request("POST", "/v1/embeddings", body)
    assert [each["embedding"][0] for each in answer.json["data"]] == [1, 2, 3]


async def test_a_millstream_can_be_the_server(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OpenAI-compatible server that refuses what it does not know: streams, chats, keys."""
    monkeypatch.setenv("MILLSTREAM_UPSTREAM_MILL", KEY)
    async with cell(nats_url) as (gateway,):
        model = model_of(f"{gateway.url}/v1", "far", api_key_variable="MILLSTREAM_UPSTREAM_MILL")
        options = {**model.default.options, "model": "mock"}
        version = model.default.model_copy(update={"options": options})
        async with connect(nats_url, "test") as broker:
            registry = await Registry.open(broker)
            await registry.add_model(model.model_copy(update={"versions": {version.id: version}}))
            await registry.close()
        async with running(gpu_worker.service, worker_settings(nats_url, model=("far",))):
            await eventually(lambda: _knows(gateway, "far"))
            wanted: dict[str, Any] = {"seed": 7, "max_tokens": 30, "logprobs": 2, "stop": ["none"]}
            near = await gateway.complete("hello", **wanted)
            far = await gateway.complete("hello", model="far", stream=True, **wanted)
            chat = await gateway.request("POST", "/v1/chat/completions", _chat("far"))
    assert far.text == near.text
    assert near.json["usage"]["completion_tokens"] == 30
    assert chat.json["choices"][0]["message"]["content"]


def _chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


async def _knows(gateway: RunningGateway, model: str) -> bool:
    answer = await gateway.request("GET", "/v1/models")
    return any(each["id"] == model for each in answer.json["data"])
