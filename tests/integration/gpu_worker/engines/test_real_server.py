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
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from registry.remote_models import RemoteServer, remote_model
from tests.support.gateways import RunningGateway, cell_with_model
from tests.support.stub_upstream import UpstreamCall, running_upstream

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


class CuttingRelay:
    """A responder that passes calls on; the next ones end after so many events as `cuts` says."""

    def __init__(self) -> None:
        self.cuts, self.calls = deque[int](), 0

    def __call__(self, call: UpstreamCall) -> None:
        self.calls += 1
        left = self.cuts.popleft() if self.cuts else None
        asked = urllib.request.Request(SERVER + call.path, json.dumps(call.body).encode(), JSON)
        call.send_head(kind="text/event-stream")
        with urllib.request.urlopen(asked) as answer:
            events = (line for line in answer if line.strip())
            for count, line in enumerate(events):
                if count == left:
                    return
                call.wfile.write(line + b"\n")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "wheels": {"enum": [1, 2, 3]}},
    "required": ["name", "wheels"],
    "additionalProperties": False,
}
RESUMED: dict[str, dict[str, Any]] = {
    "json": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}}
    },
    "presence": {"presence_penalty": 1.5, "ignore_eos": True},
    "frequency": {"frequency_penalty": 1.5, "ignore_eos": True},
    "repetition": {"repetition_penalty": 1.3, "ignore_eos": True},
    "plain": {"ignore_eos": True},
}


@pytest.mark.parametrize("api", ["vllm", "openai"])
@pytest.mark.parametrize("name", RESUMED)
async def test_a_stream_that_is_cut_ends_as_the_server_would_have(
    nats_url: str, api: Any, name: str
) -> None:
    """Greedy, and alone on the server: with a grammar and with each penalty, cut twice."""
    relay = CuttingRelay()
    with running_upstream(relay) as upstream:
        server = RemoteServer(url=upstream.url, model="far", api=api)
        model = remote_model(server, "far", tokenizer=TOKENIZER)
        async with cell_with_model(nats_url, model) as gateway:
            whole = await gateway.complete(PROMPTS[0], **GREEDY, **RESUMED[name])
            relay.cuts.extend([4, 7])
            answer = await gateway.complete(PROMPTS[0], **GREEDY, **RESUMED[name])
    assert (answer.text, relay.calls) == (whole.text, 4)
    if "response_format" in RESUMED[name]:
        assert answer.text.count("{") == 1
