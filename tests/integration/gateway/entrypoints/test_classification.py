"""Classification and reranking: a real model behind a gateway, by every door."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

import dispatcher.service
import gpu_worker.service
from gpu_worker.models.loading import Loader
from gpu_worker.settings import WorkerSettings
from registry.model_inspection import model_from
from registry.models import Model
from registry.store import Registry
from streams import messages
from streams.messages import Request
from streams.records.token_log import TokenLog
from streams.subjects import LogAddress
from tests.engine.tiny_encoders import CLS, CONTEXT, SEP, classifier
from tests.integration.gateway.entrypoints.test_nats_ingress import producer
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import MSGPACK, RunningGateway, gateways
from tests.support.services import (
    ROUTE,
    BrokerClient,
    always,
    broker_client_of,
    dispatcher_settings,
    running,
    worker_settings,
)

QUERY, DOCUMENTS = "what is a mill?", ["a wheel", "a stream beside a mill", "nothing", "a mill"]


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("labels"), "bert", 3)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("ranker"), "bert", 1)


@asynccontextmanager
async def serving(nats_url: str, **settings: Any) -> AsyncIterator[RunningGateway]:
    """A gateway, and a worker with every model that is registered."""
    async with connect(nats_url, "test") as broker:
        registry = await Registry.open(broker, declares=always)
        names = tuple(registry.models)
        await registry.close()
    async with (
        gateways(nats_url, **settings) as (gateway,),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, model=names)),
    ):
        await eventually(gateway.is_ready)
        yield gateway


async def register(nats_url: str, directories: Mapping[str, Path]) -> None:
    async with connect(nats_url, "test") as broker:
        registry = await Registry.open(broker, declares=always)
        for name, directory in directories.items():
            await registry.add_model(model_from(directory, name))
        await registry.close()


async def test_an_engine_has_the_threads_that_its_worker_was_given(labels: Path) -> None:
    """Two workers on one machine would otherwise take each other's cores."""
    before = torch.get_num_threads()
    settings = WorkerSettings(model=("labels",), threads=before + 1)
    registered = model_from(labels, "labels")
    version = registered.versions[registered.default_version]
    engine = (await Loader(settings).load(registered, version, None)).engine
    try:
        assert await asyncio.to_thread(torch.get_num_threads) == before + 1
    finally:
        engine.close()
        torch.set_num_threads(before)


def model(directory: Path) -> PreTrainedModel:
    made: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(directory)
    return made


def probabilities(directory: Path, text: str) -> list[float]:
    ids = [CLS, *map(ord, text), SEP]
    with torch.inference_mode():
        logits: torch.Tensor = model(directory)(torch.tensor([ids])).logits[0]
    found: list[float] = logits.softmax(-1).tolist()
    return found


def score(directory: Path, document: str) -> float:
    first, second = [CLS, *map(ord, QUERY), SEP], [*map(ord, document), SEP]
    types = [0] * len(first) + [1] * len(second)
    with torch.inference_mode():
        logits = model(directory)(
            torch.tensor([first + second]), token_type_ids=torch.tensor([types])
        ).logits
    return float(torch.sigmoid(logits))


def assert_like(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same but for rounding, which depends on who else was in the batch."""
    for item, other in zip(found, expected, strict=True):
        assert item == other | {"probs": pytest.approx(other["probs"], abs=1e-5)}


async def test_texts_are_classified_in_vllms_shape(nats_url: str, labels: Path) -> None:
    """One text, several, or their token ids; usage counts the tokens of all."""
    await register(nats_url, {"m": labels})
    async with serving(nats_url) as gateway:
        texts = ["a mill", "a wheel"]
        answer = await gateway.request("POST", "/v1/classify", {"model": "m", "input": texts})
        body = answer.json
        assert body["id"] == "classify-" + answer.headers["x-request-id"]
        assert (body["object"], body["model"], body["created"] > 0) == ("list", "m", True)
        assert body["usage"]["prompt_tokens"] == sum(map(len, texts)) + 4
        for index, (item, text) in enumerate(zip(body["data"], texts, strict=True)):
            expected = probabilities(labels, text)
            assert item["probs"] == pytest.approx(expected, abs=1e-5)
            likeliest = f"l{expected.index(max(expected))}"
            assert (item["index"], item["label"], item["num_classes"]) == (index, likeliest, 3)
        ids = [CLS, *map(ord, "a mill"), SEP]
        for same in ("a mill", ids, [ids]):
            again = await gateway.request("POST", "/v1/classify", {"model": "m", "input": same})
            assert_like(again.json["data"], body["data"][:1])


async def test_documents_come_by_falling_relevance(nats_url: str, ranker: Path) -> None:
    """The query and each document are a pair, with BERT's types, as the model was trained."""
    await register(nats_url, {"m": ranker})
    scores = {index: score(ranker, document) for index, document in enumerate(DOCUMENTS)}
    order = sorted(scores, key=scores.__getitem__, reverse=True)
    asked = {"model": "m", "query": QUERY, "documents": DOCUMENTS}
    async with serving(nats_url) as gateway:
        answer = await gateway.request("POST", "/v1/rerank", asked)
        body = answer.json
        assert body["id"] == "rerank-" + answer.headers["x-request-id"]
        assert [result["index"] for result in body["results"]] == order
        for result in body["results"]:
            index = result["index"]
            assert result["relevance_score"] == pytest.approx(scores[index], abs=1e-5)
            assert result["document"] == {"text": DOCUMENTS[index]}
        tokens = sum(len(QUERY) + len(document) + 3 for document in DOCUMENTS)
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
        as_objects = {**asked, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 0}
        again = (await gateway.request("POST", "/rerank", as_objects)).json["results"]
        for result, other in zip(again, body["results"], strict=True):
            same_score = pytest.approx(other["relevance_score"], abs=1e-5)
            assert result == other | {"relevance_score": same_score}
        few = {**asked, "top_n": 2, "return_documents": False}
        results = (await gateway.request("POST", "/v1/rerank", few)).json["results"]
        assert [{*result} for result in results] == [{"index", "relevance_score"}] * 2
        assert [result["index"] for result in results] == order[:2]


@pytest.mark.parametrize("subprotocol", ["millstream.v1.json", MSGPACK])
async def test_classifications_come_over_the_socket(
    nats_url: str, labels: Path, subprotocol: str
) -> None:
    """One `result` frame with the items that HTTP has; a resumed request has the same."""
    await register(nats_url, {"m": labels})
    async with serving(nats_url) as gateway, gateway.socket(subprotocol) as socket:
        await socket.send(type="classify", id="a", model="m", input=["a mill", "a wheel"])
        frames = await socket.receive_rest("a")
        assert [frame["type"] for frame in frames] == ["accepted", "started", "result"]
        over_http = await gateway.request(
            "POST", "/v1/classify", {"model": "m", "input": ["a mill", "a wheel"]}
        )
        assert_like(frames[-1]["data"], over_http.json["data"])
        request_id = frames[0]["request_id"]
        await socket.send(type="resume", id="b", request_id=request_id, after=-1)
        assert (await socket.receive_rest("b"))[-1]["data"] == frames[-1]["data"]


async def test_a_long_answer_comes_in_one_frame(nats_url: str, labels: Path) -> None:
    """However many inputs there were: every one is there, in order."""
    await register(nats_url, {"m": labels})
    async with serving(nats_url) as gateway, gateway.socket(max_size=None) as socket:
        inputs = [[3 + n % 200] * (1 + n % 9) for n in range(2000)]
        await socket.send(type="classify", id="a", model="m", input=inputs)
        (*_, result) = await socket.receive_rest("a")
        assert [item["index"] for item in result["data"]] == list(range(2000))
        (*_, same) = [item for item in result["data"] if item["index"] == 1800]
        assert same["probs"] == pytest.approx(result["data"][0]["probs"], abs=1e-5)


WRONG: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no input": ("classify", {}, "invalid_request", "input"),
    "an empty text": ("classify", {"input": ["x", ""]}, "invalid_request", "input"),
    "unknown field": ("classify", {"input": "x", "colour": 1}, "unknown_field", "colour"),
    "a long text": (
        "classify",
        {"input": ["x", "x" * CONTEXT]},
        "context_length_exceeded",
        "input[1]",
    ),
    "a strange token": ("classify", {"input": [[5], [999]]}, "token_out_of_range", "input"),
    "no query": ("rerank", {"documents": ["x"]}, "invalid_request", "query"),
    "an empty query": ("rerank", {"query": "", "documents": ["x"]}, "invalid_request", "query"),
    "no documents": ("rerank", {"query": "x", "documents": []}, "invalid_request", "documents"),
    "a document of nothing": (
        "rerank",
        {"query": "x", "documents": ["x", {"text": "x", "title": "y"}]},
        "invalid_request",
        "documents",
    ),
    "an empty document": (
        "rerank",
        {"query": "x", "documents": ["x", {"text": ""}]},
        "invalid_request",
        "documents",
    ),
    "a long pair": (
        "rerank",
        {"query": "x" * 40, "documents": ["x", "x" * 40]},
        "context_length_exceeded",
        "documents[1]",
    ),
    "a negative top_n": (
        "rerank",
        {"query": "x", "documents": ["x"], "top_n": -1},
        "invalid_request",
        "top_n",
    ),
    "several labels": (
        "rerank",
        {"model": "labels", "query": "x", "documents": ["x"]},
        "unsupported_value",
        "model",
    ),
    "a model that classifies": ("embeddings", {"input": "x"}, "unsupported_value", "model"),
}


async def test_what_is_wrong_is_a_400_that_names_it(
    nats_url: str, labels: Path, ranker: Path
) -> None:
    """Before anything is queued, with the field and the place in a list."""
    await register(nats_url, {"labels": labels, "m": ranker})
    async with gateways(nats_url) as (gateway,):
        for what, (path, fields, code, param) in WRONG.items():
            answer = await gateway.request("POST", f"/v1/{path}", {"model": "m", **fields})
            found = (answer.status, answer.error["code"], answer.error["param"])
            assert found == (400, code, param), what


async def test_a_producer_has_texts_classified(nats_url: str, labels: Path) -> None:
    """The records name the labels: it has no registry to look them up in."""
    await register(nats_url, {"m": labels})
    async with (
        serving(nats_url),
        producer(nats_url) as p,
    ):
        wanted = {"type": "classify", "input": "a mill"}
        await p.submit(wanted, "a", "infer.submit.acme.m.standard")
        await eventually(lambda: len(p.ended()) == 1)
        (records,) = p.replies.values()
        assert [each["type"] for each in records] == ["accepted", "started", "result", "done"]
        assert records[2]["labels"] == ["l0", "l1", "l2"]
        assert len(records[2]["vectors"]) == 1


@pytest.mark.parametrize("stored", [1, 3])
async def test_a_second_attempt_adds_only_the_scores_that_are_missing(
    nats_url: str, ranker: Path, stored: int
) -> None:
    """Each pair keeps its own types; there is one ledger record."""
    made = model_from(ranker, "mock", "1")
    inputs, splits = _pairs()
    payload = Request("classify", inputs=inputs, splits=splits).pack()
    async with (
        broker_client_of(nats_url, made) as c,
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        envelope = c.envelope(30, 0)
        log = TokenLog(c.broker, LogAddress("acme", ROUTE, envelope.request_id), 1)
        await log.claim("mock", "1", "dead")
        part = {"type": "result", "index": 0, "count": stored, "vectors": [b"\0" * 4] * stored}
        await log.append(part)
        request = await c.publish_work(envelope, payload)
        await eventually(lambda: c.terminal(request))
        rows = [
            torch.frombuffer(bytearray(row), dtype=torch.float32).item()
            for record in c.records[request]
            if record["type"] == "result"
            for row in record["vectors"]
        ]
        expected = [0.0] * stored + [score(ranker, text) for text in DOCUMENTS[stored:]]
        assert rows == pytest.approx(expected, abs=1e-5)
        await eventually(lambda: _is_booked(c, request))


async def _is_booked(c: BrokerClient, request: str) -> bool:
    return (await c.ledger_counts())[request] == 1


def _pairs() -> tuple[list[bytes], list[int]]:
    first = [CLS, *map(ord, QUERY), SEP]
    pairs = [[*first, *map(ord, document), SEP] for document in DOCUMENTS]
    return [messages.pack_tokens(pair) for pair in pairs], [len(first)] * len(pairs)


def test_a_classifier_is_recognised(ranker: Path, labels: Path) -> None:
    """By its architecture; labels are counted for those who want to rank."""
    found: list[Model] = [model_from(path, "m") for path in (ranker, labels)]
    assert [(m.engine, m.task, m.default.num_labels) for m in found] == [
        ("classify", "classify", 1),
        ("classify", "classify", 3),
    ]
