"""Frames that were valid once: seeded mutations of their structure and of their bytes. Pure."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import msgpack

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
VALID: list[dict[str, Any]] = [
    {"type": "generate", "model": "mock", "prompt": "hello", "max_tokens": 1},
    {
        "type": "generate",
        "model": "mock",
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"3": 1.5, "7": -100},
        "seed": 7,
        "stop": ["a", "b"],
        "logprobs": 2,
        "ignore_eos": True,
        "priority": "batch",
        "deadline_ms": 60_000,
    },
    {
        "type": "generate",
        "model": "mock",
        "max_tokens": 2,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "r", "tool_call_id": "c", "name": "f"},
        ],
        "tools": [TOOL],
    },
    {
        "type": "generate",
        "model": "mock",
        "prompt": "x",
        "max_tokens": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    {
        "type": "generate",
        "model": "mock",
        "prompt": "x",
        "max_tokens": 1,
        "structured_outputs": {"choice": ["a", "b"]},
    },
    {"type": "embed", "model": "vectors", "input": ["a", "b"], "dimensions": 4},
    {"type": "classify", "model": "vectors", "input": [[1, 2], [3]]},
    {"type": "cancel"},
    {"type": "resume", "request_id": "0a1b", "after": -1},
]
SCALARS: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 2**31 - 1, 2**31, 2**53, 2**63, -(2**63), 2**64 - 1),
    *(0.0, -0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", " ", "x", "0", "\0", "\n", "é", "😀", "a" * 300, "../../etc", "*", ">", "a.b", "{{7*7}}"),
    *("mock@1", "mock:x", "mock@", ":", "@", "generate", "tool", "text", "null"),
]
CONTAINERS: list[Any] = [[], {}, [[]], [{}], {"": ""}, {"type": "x"}, ["a"] * 40, list(range(300))]
BINARY: list[Any] = [b"", b"x", b"\xff" * 9, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1)]
LARGEST = 300_000  # bytes; what is far over the limit of a frame would close the socket


def mutated_frames(seed: int, *, packed: bool) -> Iterator[bytes]:
    """Endless frames of one seed: JSON in UTF-8, or msgpack."""
    chance = random.Random(seed)
    pool = SCALARS + CONTAINERS + (BINARY if packed else [])
    for number in range(2**62):
        frame = copy.deepcopy(chance.choice(VALID)) | {"id": f"{number}-{seed}"}
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            frame = _mutated(chance, frame, pool)
        data = msgpack.packb(frame) if packed else json.dumps(frame, default=str).encode()
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            data = _scrambled(chance, data)
        yield data[:LARGEST] if packed else data[:LARGEST].decode(errors="replace").encode()


def _mutated(chance: random.Random, frame: Any, pool: list[Any]) -> Any:
    """One change somewhere in the tree, if anything is left of it."""
    places = list(_places(frame))
    if not places:
        return frame
    place, key = chance.choice(places)
    change = chance.randrange(6)
    if change == 0:
        del place[key]
    elif change == 1:
        place[key] = [place[key]] * chance.choice((1, 2, 50))
    elif change == 2:
        place[key] = _nested(chance, place[key])
    elif change == 3 and isinstance(place, dict):
        place[chance.choice(["extra", "", "id", "type", "prompt", "stop"])] = place[key]
    else:
        place[key] = copy.deepcopy(chance.choice(pool))
    return frame


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _nested(chance: random.Random, value: Any) -> Any:
    for _ in range(chance.choice((1, 3, 90, 150))):
        value = {"a": value} if chance.random() < 0.5 else [value]
    return value


def _scrambled(chance: random.Random, data: bytes) -> bytes:
    """One change of bytes: some flipped, cut out, put in, or said twice."""
    at, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    noise = chance.randbytes(chance.choice((1, 2, 8)))
    return chance.choice(
        [
            data[:at] + noise + data[at:],
            data[:at] + noise + data[at + len(noise) :],
            data[:at] + data[end:],
            data[:end] + data[at:end] + data[end:],
            data[:at],
        ]
    )
