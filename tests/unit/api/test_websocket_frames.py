"""Frames: what a WebSocket client may say, and how a wrong one is answered."""

from typing import Any

import msgpack
import orjson
import pytest

from api.schemas.fields import Body
from api.schemas.parsing import decode, find_frame_id, parse_frame, parse_submission
from api.schemas.websocket_frames import (
    CancelFrame,
    ClassifyFrame,
    ClassifySubmission,
    EmbedFrame,
    EmbedSubmission,
    GenerateFrame,
    GenerateSubmission,
    ResumeFrame,
)
from streams.errors import BadRequest
from streams.subjects import Priority

GENERATE = {"type": "generate", "id": "a", "model": "m"}
EMBED = {"type": "embed", "id": "a", "model": "m", "input": ["x", "y"]}


def refusal(wire: dict[str, Any]) -> tuple[str, str | None]:
    with pytest.raises(BadRequest) as refused:
        parse_frame(wire)
    return refused.value.code, refused.value.field


def test_both_encodings_carry_the_same_maps() -> None:
    """`millstream.v1.json` and `millstream.v1.msgpack` are one contract."""
    wire = GENERATE | {"prompt": "ü", "stop": ["."], "deadline_ms": 5, "idempotency_key": "k"}
    frames = [
        parse_frame(decode(orjson.dumps(wire))),
        parse_frame(decode(orjson.dumps(wire).decode())),
        parse_frame(decode(msgpack.packb(wire), "msgpack")),
    ]
    assert frames == [parse_frame(wire)] * 3


def test_every_frame_of_the_contract_is_known() -> None:
    """DESIGN's table of what clients send."""
    frames = [
        parse_frame(GENERATE | {"prompt": [1, 2], "priority": "batch"}),
        parse_frame(GENERATE | {"messages": [{"role": "user", "content": "x"}]}),
        parse_frame(EMBED | {"dimensions": 8}),
        parse_frame(EMBED | {"type": "classify"}),
        parse_frame({"type": "cancel", "id": "a"}),
        parse_frame({"type": "resume", "id": "a", "request_id": "0f" * 16, "after": -1}),
    ]
    kinds = [
        GenerateFrame,
        GenerateFrame,
        EmbedFrame,
        ClassifyFrame,
        CancelFrame,
        ResumeFrame,
    ]
    assert [type(frame) for frame in frames] == kinds
    assert isinstance(frames[0], GenerateFrame)
    assert frames[0].lane_priority == Priority.BATCH


@pytest.mark.parametrize(
    ("wire", "code", "field"),
    [
        ({"type": "nope"}, "invalid_request", "type"),
        ({"type": ["generate"]}, "invalid_request", "type"),
        ({}, "invalid_request", "type"),
        ({"type": "classify", "id": "a", "model": "m"}, "invalid_request", "input"),
        (EMBED | {"type": "classify", "dimensions": 8}, "unknown_field", "dimensions"),
        (GENERATE, "invalid_request", "prompt"),
        (GENERATE | {"prompt": "x", "messages": []}, "invalid_request", "messages"),
        (
            GENERATE | {"prompt": "x", "messages": [{"role": "user", "content": ""}]},
            "invalid_request",
            "prompt",
        ),
        (GENERATE | {"prompt": "x", "model": 7}, "invalid_request", "model"),
        (GENERATE | {"prompt": "x", "id": 7}, "invalid_request", "id"),
        (GENERATE | {"prompt": "x", "stream": True}, "unknown_field", "stream"),
        (EMBED | {"input": []}, "invalid_request", "input"),
        (EMBED | {"prompt": "x"}, "unknown_field", "prompt"),
        ({"type": "cancel"}, "invalid_request", "id"),
        ({"type": "cancel", "id": "i" * 129}, "invalid_request", "id"),
        ({"type": "resume", "id": "a", "after": 0}, "invalid_request", "request_id"),
        (
            {"type": "resume", "id": "a", "request_id": "a.>", "after": 0},
            "invalid_request",
            "request_id",
        ),
        (
            {"type": "resume", "id": "a", "request_id": "r", "after": -2},
            "invalid_request",
            "after",
        ),
    ],
)
def test_a_wrong_frame_is_told_why(wire: dict[str, Any], code: str, field: str) -> None:
    """The socket lives on, so the answer is all that the client gets."""
    assert refusal(wire) == (code, field)


def test_the_id_of_a_wrong_frame_is_told_back() -> None:
    """Many requests share a socket; the client must know which one failed."""
    assert find_frame_id({"type": "nope", "id": "x"}) == "x"
    for wire in ({}, {"id": 7}, {"id": ""}, {"id": "i" * 129}, {"id": None}):
        assert find_frame_id(wire) is None


@pytest.mark.parametrize(
    ("wire", "record"),
    [
        ({"prompt": "x"}, GenerateSubmission),
        ({"prompt": "x", "type": "generate"}, GenerateSubmission),
        ({"input": "x"}, EmbedSubmission),
        ({"input": "x", "type": "embed"}, EmbedSubmission),
        ({"input": "x", "type": "classify"}, ClassifySubmission),
    ],
)
def test_a_producer_says_what_it_wants(wire: dict[str, Any], record: type[Body]) -> None:
    """An input may be there to embed or to classify; without a type it is the former."""
    assert type(parse_submission(wire, "m", "batch")) is record


@pytest.mark.parametrize("kind", ["cancel", "nope", 7, None])
def test_a_producer_cannot_submit_what_is_no_work(kind: object) -> None:
    """Other frames belong to sockets."""
    with pytest.raises(BadRequest, match="must be one of generate, embed, classify"):
        parse_submission({"input": "x", "type": kind}, "m", "batch")


def test_a_producers_submission_takes_model_and_priority_from_its_subject() -> None:
    """The subject is what NATS permissions are about; a body cannot get around it."""
    generate = parse_submission({"prompt": "x", "max_tokens": 4}, "m", "batch")
    embed = parse_submission({"input": "x", "model": "m"}, "m", "batch")
    assert (
        (generate.model, generate.lane_priority)
        == (embed.model, embed.lane_priority)
        == ("m", Priority.BATCH)
    )
    for name, other in (("model", "other"), ("priority", "interactive")):
        with pytest.raises(BadRequest, match=f"{name} differs"):
            parse_submission({"prompt": "x", name: other}, "m", "batch")
