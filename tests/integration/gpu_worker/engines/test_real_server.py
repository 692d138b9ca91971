"""A real OpenAI-compatible server behind a worker, where MILLSTREAM_TEST_SERVER has its URL.

    vllm serve DIRECTORY --served-model-name far --port 8765
    MILLSTREAM_TEST_SERVER=http://127.0.0.1:8765/v1 MILLSTREAM_TEST_TOKENIZER=DIRECTORY pytest …

`tests/support/stub_upstream.py` imitates such servers in every way in which they fail; this is
for how they are.
"""

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from registry.remote_models import RemoteServer, remote_model
from tests.support.gateways import RunningGateway, cell_with_model

SERVER = os.environ.get("MILLSTREAM_TEST_SERVER", "")
TOKENIZER = Path(os.environ.get("MILLSTREAM_TEST_TOKENIZER", "."))
PROMPTS = [f"The old mill by the stream had {number} wheels, and" for number in range(8)]
JSON = {"Content-Type": "application/json"}
GREEDY: dict[str, Any] = {"model": "far", "max_tokens": 32, "temperature": 0}

pytestmark = pytest.mark.skipif(not SERVER, reason="no MILLSTREAM_TEST_SERVER")


@pytest.fixture(params=["vllm", "openai"])
async def gateway(request: pytest.FixtureRequest, nats_url: str) -> AsyncIterator[RunningGateway]:
    """With token ids, and with texts alone."""
    server = RemoteServer(url=SERVER, model="far", api=request.param)
    async with cell_with_model(nats_url, remote_model(server, "far", tokenizer=TOKENIZER)) as found:
        yield found


def _directly(prompt: str) -> str:
    body = json.dumps({**GREEDY, "prompt": prompt}).encode()
    asked = urllib.request.Request(SERVER + "/completions", body, JSON)
    with urllib.request.urlopen(asked) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.parametrize("stream", [True, False])
async def test_texts_are_those_of_the_server(gateway: RunningGateway, stream: bool) -> None:
    """One at a time, since the tokens of such a server depend on who shares its batch."""
    for prompt in PROMPTS[:3]:
        wanted = await asyncio.to_thread(_directly, prompt)
        assert (await gateway.complete(prompt, stream=stream, **GREEDY)).text == wanted


async def test_many_at_once_are_all_answered(gateway: RunningGateway) -> None:
    """Each whole, with the server's own count."""
    asked = [gateway.complete(prompt, ignore_eos=True, **GREEDY) for prompt in PROMPTS]
    for answer in await asyncio.gather(*asked):
        assert answer.text
        assert answer.json["usage"]["completion_tokens"] == 32


async def test_usage_and_log_probabilities_are_the_servers(gateway: RunningGateway) -> None:
    """As many as were asked for, with a log probability each."""
    answer = await gateway.complete(PROMPTS[0], logprobs=2, ignore_eos=True, **GREEDY)
    choice = answer.json["choices"][0]
    assert answer.json["usage"]["completion_tokens"] == 32
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 32
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])


async def test_a_stop_string_ends_it(gateway: RunningGateway) -> None:
    """The text before it, which is a prefix of the whole."""
    whole = (await gateway.complete(PROMPTS[1], **GREEDY)).text
    stop = whole.split()[4]
    answer = await gateway.complete(PROMPTS[1], stop=[stop], **GREEDY)
    assert answer.text == whole[: whole.index(stop)]
    assert answer.json["choices"][0]["finish_reason"] == "stop"
