"""Streams over HTTP that go on after a cut: the same POST, with its key and its last event's id."""

import json
import re
from collections import defaultdict
from typing import Any

import pytest

from tests.integration.gateway.entrypoints.test_tool_calls import CALL, HERMES, TOOL
from tests.support.fixed_text_engine import fixed_text_gateway
from tests.support.gateways import RunningGateway, cell

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SLOW = {"ttft_ms": 1, "itl_ms": 2}
LONG: dict[str, Any] = {"model": "mock", "prompt": "hello", "max_tokens": 200, "seed": 3}
ASKED: dict[str, Any] = {
    "model": "mock",
    "messages": [{"role": "user", "content": "how is it?"}],
    "max_tokens": 200,
    "seed": 3,
}


def events_in(data: bytes) -> list[tuple[str, str]]:
    """The ids and data of the whole events; one that was cut is none."""
    found = re.findall(rb"id: (.*)\ndata: (.*)\n\n", data)
    return [(event_id.decode(), value.decode()) for event_id, value in found]


async def read_until_cut(
    gateway: RunningGateway, path: str, body: dict[str, Any], key: str, count: int
) -> list[tuple[str, str]]:
    """The first events of a stream, at least `count`; then its connection breaks."""
    exchange = await gateway.open("POST", path, body, headers={"Idempotency-Key": key})
    await exchange.read_head()
    data = b""
    while len(events_in(data)) < count and (chunk := await exchange.read_chunk()):
        data += chunk
    exchange.abort()
    return events_in(data)[:count]  # as if the cut had come before the rest


async def resume(
    gateway: RunningGateway, path: str, body: dict[str, Any], key: str, last: str
) -> list[tuple[str, str]]:
    headers = {"Idempotency-Key": key, "Last-Event-ID": last}
    answer = await gateway.request("POST", path, body, headers=headers)
    assert answer.status == 200
    return events_in(answer.body)


def by_choice(events: list[tuple[str, str]]) -> dict[int, list[Any]]:
    """The events of each choice, in order; those after all choices have the key -1."""
    found = defaultdict(list)
    for _, data in events:
        if data != "[DONE]":
            event = json.loads(data)
            head = (event["id"], event["object"], event["model"])
            found[event["choices"][0]["index"] if event["choices"] else -1].append((head, event))
    return {
        choice: [(head, {**event, "created": 0}) for head, event in told]
        for choice, told in found.items()
    }


async def whole(
    gateway: RunningGateway, path: str, body: dict[str, Any], key: str
) -> list[tuple[str, str]]:
    """The uncut stream of the same request, from its begin."""
    answer = await gateway.request("POST", path, body, headers={"Idempotency-Key": key})
    return events_in(answer.body)


BODIES = {
    "a completion": (COMPLETION, LONG),
    "completions": (COMPLETION, {**LONG, "n": 3, "stream_options": {"include_usage": True}}),
    "prompts": (COMPLETION, {**LONG, "prompt": ["one", "two"], "logprobs": 2}),
    "a chat": (CHAT, {**ASKED, "logprobs": True}),
    "chats": (CHAT, {**ASKED, "n": 2, "stream_options": {"include_usage": True}}),
}


async def test_a_cut_stream_goes_on_at_any_gateway(nats_url: str) -> None:
    """Both parts joined equal the stream that was not cut."""
    async with cell(nats_url, 2, mock=SLOW) as gateways:
        for name, (path, body) in BODIES.items():
            streamed = {**body, "stream": True}
            for where, other in enumerate(gateways):
                key, count = f"{name}-{where}", 5 + 40 * where
                events = await read_until_cut(gateways[0], path, streamed, key, count)
                events += await resume(other, path, streamed, key, events[-1][0])
                assert events[-1][1] == "[DONE]"
                assert [data for _, data in events].count("[DONE]") == 1
                uncut = await whole(gateways[0], path, streamed, key)
                assert by_choice(events) == by_choice(uncut)
                created = {json.loads(d)["created"] for _, d in events if d != "[DONE]"}
                assert len(created) == 1


async def test_a_chat_with_tools_goes_on_behind_any_event(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record may become several events, and text may be held back at the cut."""
    body = {**ASKED, "tools": [TOOL], "n": 2, "stream": True}
    async with fixed_text_gateway(nats_url, monkeypatch, f"I look.\n{CALL}\n{CALL}", HERMES) as one:
        uncut = await whole(one, CHAT, body, "tools")
        for cut in range(1, len(uncut)):
            rest = await resume(one, CHAT, body, "tools", uncut[cut - 1][0])
            assert by_choice(uncut[:cut] + rest) == by_choice(uncut)
            assert rest[-1][1] == "[DONE]"
        assert await resume(one, CHAT, body, "tools", uncut[-1][0]) == []


async def test_only_a_known_request_can_go_on(nats_url: str) -> None:
    """Another request's tokens must never follow: its text would be another one."""
    async with cell(nats_url, mock=SLOW) as (gateway,):
        body = {**LONG, "stream": True}
        first = await read_until_cut(gateway, COMPLETION, body, "known", 3)
        last = {"Last-Event-ID": first[-1][0]}
        unkeyed = await gateway.request("POST", COMPLETION, body, headers=last)
        assert (unkeyed.status, unkeyed.error["param"]) == (400, "Last-Event-ID")
        unknown = {**last, "Idempotency-Key": "unknown"}
        refused = await gateway.request("POST", COMPLETION, body, headers=unknown)
        assert (refused.status, refused.error["code"]) == (404, "request_not_found")
        wrong = {"Last-Event-ID": "7", "Idempotency-Key": "known"}
        answer = await gateway.request("POST", COMPLETION, body, headers=wrong)
        assert (answer.status, answer.error["param"]) == (400, "Last-Event-ID")
        changed = {**last, "Idempotency-Key": "known"}
        other = await gateway.request("POST", COMPLETION, {**body, "seed": 4}, headers=changed)
        assert other.status == 409
