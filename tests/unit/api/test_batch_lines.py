"""Lines of a batch: what is taken, what is refused, and what stands for it in the output."""

import json
from typing import Any

import pytest

from api.batches.batch_line import (
    BATCH_CANCELLED,
    BatchLine,
    WrongLine,
    parse_body,
    parse_line,
    render_result,
    render_unrun,
    to_submission,
)
from registry.models import mock_model
from streams.errors import BadRequest
from streams.messages import done_record, openai_usage
from streams.records.jobs.item_results import ItemResult, build_result
from streams.subjects import Priority

CHAT = "/v1/chat/completions"
BODY = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
GOOD = {"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY}
LINE = BatchLine("a", CHAT, BODY)
USAGE = openai_usage(3, 5)


def test_a_result_keeps_the_stop_string_that_ended_its_text() -> None:
    """A result without one, of an earlier release, is read as before."""
    ends = [done_record("stop", USAGE, {}, "END"), done_record("stop", USAGE, {})]
    for end in ends:
        result = ItemResult.unpack(build_result("r", 1, 5, [], end).pack())
        assert result.to_terminal() == end


def test_a_line_is_a_submission_at_the_priority_of_batches() -> None:
    """Whatever priority its body asks for."""
    line = parse_line(
        json.dumps(GOOD | {"body": BODY | {"priority": "interactive"}}).encode(), CHAT
    )
    submission = to_submission(line, parse_body(line))
    assert (submission.priority, submission.model) == (Priority.BATCH, "mock")


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"custom_id": ""}, "missing_required_parameter", "custom_id"),
        ({"custom_id": "x" * 513}, "missing_required_parameter", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/embeddings"}, "url_mismatch", "url"),
        ({"body": "text"}, "missing_required_parameter", "body"),
    ],
)
def test_a_line_that_is_no_request_says_what_is_wrong(
    change: dict[str, Any], reason: str, field: str
) -> None:
    """With OpenAI's code for it."""
    with pytest.raises(WrongLine) as wrong:
        parse_line(json.dumps(GOOD | change).encode(), CHAT)
    assert (wrong.value.reason, wrong.value.field) == (reason, field)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"{}" * 2])
def test_what_is_no_json_object_is_no_line(data: bytes) -> None:
    """Any bytes may be in a file."""
    with pytest.raises(WrongLine) as wrong:
        parse_line(data, CHAT)
    assert wrong.value.reason == "invalid_json_line"


@pytest.mark.parametrize("change", [{"stream": True}, {"n": 2}, {"colour": "red"}])
def test_a_body_that_no_batch_can_answer_is_refused(change: dict[str, Any]) -> None:
    """As its endpoint would, or because a line has one answer."""
    with pytest.raises(BadRequest):
        parse_body(BatchLine("a", CHAT, BODY | change))


def test_an_answer_has_the_body_of_its_endpoint() -> None:
    """Joined from all records of the log, with what was used."""
    records: list[dict[str, Any]] = [
        {"type": "started", "attempt": 1, "version": "v1"},
        {"type": "chunk", "text": "Hello, ", "index": 0, "count": 2},
        {"type": "chunk", "text": "you.", "index": 2, "count": 3},
    ]
    done = {"type": "done", "finish_reason": "length", "usage": USAGE}
    result = build_result("j0", 2, 5_000, records, done)
    assert ItemResult.unpack(result.pack()) == result
    shown = json.loads(render_result(LINE, result, mock_model("mock")))
    assert (shown["custom_id"], shown["error"]) == ("a", None)
    assert shown["response"]["status_code"] == 200
    body = shown["response"]["body"]
    assert (body["object"], body["created"], body["usage"]) == ("chat.completion", 5, USAGE)
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello, you.", "length")


def test_a_failure_has_its_status_and_a_line_that_never_ended_the_batchs() -> None:
    """Clients tell them apart by `response`."""
    failed = ItemResult("j0", 1, 5, code="deadline_exceeded", message="too late", usage=USAGE)
    shown = json.loads(render_result(LINE, failed, None))
    assert shown["response"]["status_code"] == 504
    assert shown["response"]["body"]["error"]["message"] == "too late"
    unrun = json.loads(render_unrun(LINE, "j0", BATCH_CANCELLED))
    assert (unrun["response"], unrun["error"]["code"]) == (None, "batch_cancelled")


def test_only_a_failure_that_may_pass_is_worth_another_try() -> None:
    """A request that ended before any worker began has used no try."""
    error = {"type": "error", "message": "m", "usage": USAGE}
    lost = build_result("j0", 1, 5, [], error | {"code": "work_lost"})
    late = build_result("j0", 1, 5, [], error | {"code": "deadline_exceeded"})
    begun = [{"type": "started", "attempt": 1, "version": "v1"}]
    ran = build_result("j0", 1, 5, begun, error | {"code": "deadline_exceeded"})
    wrong = build_result("j0", 1, 5, begun, error | {"code": "upstream_refused"})
    assert [(each.may_pass, each.never_ran) for each in (lost, late, ran, wrong)] == [
        (True, True),
        (True, True),
        (True, False),
        (False, False),
    ]


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x80", b"\x07", ItemResult("a", 1, 2, text=7).pack()],  # type: ignore[arg-type]
)
def test_what_is_no_result_is_not_taken_for_one(data: bytes) -> None:
    """Whoever writes results may write anything."""
    with pytest.raises((ValueError, TypeError)):
        ItemResult.unpack(data)
