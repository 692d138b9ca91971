"""A real OpenAI-compatible server behind a worker, where MILLSTREAM_TEST_SERVER has its URL.

    vllm serve DIRECTORY --served-model-name far --port 8765
    MILLSTREAM_TEST_SERVER=http://127.0.0.1:8765/v1 MILLSTREAM_TEST_TOKENIZER=DIRECTORY pytest …

`tests/upstream.py` imitates such servers in every way in which they fail; this is for how they are.
"""

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import dispatcher.service
import gpu_worker.service
from registry.remote import Api, RemoteServer, remote_model
from registry.store import Registry
from streams.connection import connect
from tests.eventually import eventually
from tests.integration.gateways import Gateway, gateways
from tests.integration.services import a_dispatcher, a_worker, running

SERVER = os.environ.get("MILLSTREAM_TEST_SERVER", "")
TOKENIZER = Path(os.environ.get("MILLSTREAM_TEST_TOKENIZER", "."))
PROMPTS = [f"The old mill by the stream had {number} wheels, and" for number in range(8)]
GREEDY: dict[str, Any] = {"model": "far", "max_tokens": 32, "temperature": 0}

pytestmark = pytest.mark.skipif(not SERVER, reason="no MILLSTREAM_TEST_SERVER")


@pytest.fixture(params=["vllm", "openai"])
async def gateway(request: pytest.FixtureRequest, nats_url: str) -> AsyncIterator[Gateway]:
    """With token ids, and with texts alone."""
    api: Api = request.param
    server = RemoteServer(url=SERVER, model="far", api=api)
    async with connect(nats_url, "test") as broker:
        registry = await Registry.open(broker)
        await registry.put(remote_model(server, "far", tokenizer=TOKENIZER, context=1024))
        await registry.close()
    async with (
        gateways(nats_url) as (gateway,),
        running(dispatcher.service, a_dispatcher(nats_url)),
        running(gpu_worker.service, a_worker(nats_url, model=("far",))),
    ):
        await eventually(gateway.is_ready)
        yield gateway


def _directly(prompt: str) -> str:
    body = json.dumps({**GREEDY, "prompt": prompt}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(SERVER + "/completions", body, headers)
    ) as r:
        return str(json.load(r)["choices"][0]["text"])


@pytest.mark.parametrize("stream", [True, False])
async def test_texts_are_those_of_the_server(gateway: Gateway, stream: bool) -> None:
    """One at a time, since the tokens of such a server depend on who shares its batch."""
    for prompt in PROMPTS[:3]:
        wanted = await asyncio.to_thread(_directly, prompt)
        assert (await gateway.complete(prompt, stream=stream, **GREEDY)).text == wanted


async def test_many_at_once_are_all_answered(gateway: Gateway) -> None:
    """Each whole, with the server's own count."""
    asked = [gateway.complete(prompt, ignore_eos=True, **GREEDY) for prompt in PROMPTS]
    for answer in await asyncio.gather(*asked):
        assert answer.text
        assert answer.json["usage"]["completion_tokens"] == 32


async def test_usage_and_log_probabilities_are_the_servers(gateway: Gateway) -> None:
    """As many as were asked for, with a log probability each."""
    answer = await gateway.complete(PROMPTS[0], logprobs=2, ignore_eos=True, **GREEDY)
    choice = answer.json["choices"][0]
    assert answer.json["usage"]["completion_tokens"] == 32
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 32
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])


async def test_a_stop_string_ends_it(gateway: Gateway) -> None:
    """The text before it, which is a prefix of the whole."""
    whole = (await gateway.complete(PROMPTS[1], **GREEDY)).text
    stop = whole.split()[4]
    answer = await gateway.complete(PROMPTS[1], stop=[stop], **GREEDY)
    assert answer.text == whole[: whole.index(stop)]
    assert answer.json["choices"][0]["finish_reason"] == "stop"
