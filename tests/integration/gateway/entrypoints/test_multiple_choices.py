"""Several answers to one body: `n`, and several prompts."""

import asyncio
from typing import Any

import openai
import pytest

import dispatcher.service
import gpu_worker.service
from streams import messages, topology
from streams.broker.broker_client import StoredMessage
from streams.messages import LedgerRecord
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.fixed_text_engine import FAILING_SEED, fixed_text_gateway
from tests.support.gateways import (
    KEY,
    HttpResponse,
    RunningGateway,
    cell,
    gateways,
    register,
    tenants,
)
from tests.support.services import dispatcher_settings, running, worker_settings

PROMPTS = ["hello", "you"]
SLOW = {"ttft_ms": 1, "itl_ms": 1}


async def outcomes(nats_url: str, requests: int) -> set[str]:
    """How so many requests ended, by the ledger, which comes behind the answers."""

    async def ended() -> list[StoredMessage]:
        stored = await broker.read_subject(topology.LEDGER, "infer.ledger.>")
        return stored if len(stored) >= requests else []

    async with connect(nats_url, "test") as broker:
        found = await eventually(ended)
    assert len(found) == requests
    return {messages.from_wire(LedgerRecord, messages.unpack(each.data)).outcome for each in found}


async def is_idle(gateway: RunningGateway) -> bool:
    return await gateway.followed_requests() == 0


def texts(answer: HttpResponse) -> list[str]:
    choices = answer.json["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


async def test_each_choice_is_what_its_own_request_would_be(nats_url: str) -> None:
    """Prompt by prompt, with the seeds that follow the one given; a prompt is counted once."""
    async with cell(nats_url) as (gateway,):
        answer = await gateway.complete(PROMPTS, n=2, seed=5)
        alone = [(await gateway.complete(p, seed=s)).text for p in PROMPTS for s in (5, 6)]
        assert texts(answer) == alone
        assert len(set(alone)) == 4
        assert answer.json["usage"] == messages.openai_usage(len("helloyou"), 4 * 8)
        assert answer.json["id"] == f"cmpl-{answer.headers['x-request-id']}"
        assert await outcomes(nats_url, 8) == {"length"}


async def test_choices_stream_side_by_side(nats_url: str) -> None:
    """Each under its index to its own end; usage comes once, behind all of them."""
    async with cell(nats_url, mock=SLOW) as (gateway,):
        body: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 300}
        whole = await gateway.complete(**body)
        streamed = await gateway.complete(
            **body, stream=True, stream_options={"include_usage": True}
        )
        assert streamed.body.count(b"[DONE]") == 1
        *events, last = streamed.events
        assert (last["choices"], last["usage"]) == ([], whole.json["usage"])
        choices = [event["choices"][0] for event in events]
        for index, text in enumerate(texts(whole)):
            mine = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in mine) == text
            assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        order = [choice["index"] for choice in choices]
        assert order != sorted(order)


async def test_the_openai_sdk_gets_its_choices(nats_url: str) -> None:
    """Chats, whole and streamed."""
    async with (
        cell(nats_url) as (gateway,),
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        asked: dict[str, Any] = {
            "model": "mock",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 9,
            "n": 2,
            "seed": 1,
        }
        chat = await client.chat.completions.create(**asked)
        contents = {choice.index: choice.message.content for choice in chat.choices}
        streamed = {0: "", 1: ""}
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == contents
        assert len(set(contents.values())) == 2


async def test_a_refused_choice_refuses_all(nats_url: str) -> None:
    """Half an answer is none: those that came in are cancelled, and the client tries again."""
    await register(nats_url, itl_ms=100)
    async with gateways(nats_url, tenants=tenants(max_queued=2)) as (gateway,):
        answer = await gateway.complete(n=3, max_tokens=3000)
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        async with (
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, worker_settings(nats_url)),
        ):
            await eventually(lambda: is_idle(gateway))
            assert await outcomes(nats_url, 2) == {"cancelled"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_all_choices(nats_url: str, stream: bool) -> None:
    """None of them has a reader any more."""
    async with cell(nats_url, mock=SLOW) as (gateway,):
        body = {"model": "mock", "prompt": "x", "max_tokens": 3000, "n": 3, "stream": stream}
        exchange = await gateway.open("POST", "/v1/completions", body)
        await eventually(lambda: three_followed(gateway))
        exchange.abort()
        await eventually(lambda: is_idle(gateway))
        assert await outcomes(nats_url, 3) == {"cancelled"}


async def three_followed(gateway: RunningGateway) -> bool:
    return await gateway.followed_requests() == 3


async def test_one_key_is_one_set_of_choices(nats_url: str) -> None:
    """Asked for again, at the same time and afterwards, they are the same; another `n` is not."""
    async with cell(nats_url, 2, mock=SLOW) as both:

        async def keyed(i: int, **body: Any) -> HttpResponse:
            headers = {"Idempotency-Key": "k"}
            return await both[i % 2].complete(PROMPTS, max_tokens=50, headers=headers, **body)

        answers = await asyncio.gather(*(keyed(i, n=2) for i in range(4)))
        answers.append(await keyed(1, n=2))
        assert {answer.json["id"] for answer in answers} == {answers[0].json["id"]}
        assert all(texts(answer) == texts(answers[0]) for answer in answers)
        conflict = await keyed(0, n=1)
        assert (conflict.status, conflict.error["code"]) == (409, "idempotency_conflict")
        assert await outcomes(nats_url, 4) == {"length"}


async def test_an_error_of_one_choice_ends_the_answer(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole as its status, streamed as the last event."""
    async with fixed_text_gateway(nats_url, monkeypatch, "some words") as gateway:
        whole = await gateway.complete(n=2, seed=FAILING_SEED - 1)
        assert (whole.status, whole.error["code"]) == (500, "engine_failed")
        streamed = await gateway.complete(n=2, seed=FAILING_SEED - 1, stream=True)
        assert streamed.status == 200
        assert streamed.events[-1]["error"]["code"] == "engine_failed"
        await eventually(lambda: is_idle(gateway))
