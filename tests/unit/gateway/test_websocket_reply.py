"""From the records of a unary request's log to the one frame that answers it."""

import json
import struct
from typing import Any

import pytest

from gateway.entrypoints.websocket_reply import ResultFrame, WebSocketReply
from gateway.metrics import RequestMetrics
from gateway.replies.log_subscription import LogSource, LogSubscription, discard_record
from gateway.replies.send_buffer import EncodedFrame
from gateway.replies.subscription_deadlines import SubscriptionDeadlines
from streams import messages

PART = {"type": "result", "index": 0, "count": 1, "vectors": [struct.pack("<2f", 0.25, 0.75)]}
REST = {"type": "result", "index": 1, "count": 1, "vectors": [struct.pack("<2f", 1, 0)]}
DONE = messages.done_record("stop", messages.openai_usage(3, 0), {"total": 1.0})


def frames_of(*records: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client of the JSON subprotocol gets behind `accepted`."""
    sent: list[dict[str, Any]] = []

    def send(frame: dict[str, Any] | EncodedFrame) -> bool:
        sent.append(frame if isinstance(frame, dict) else json.loads(frame))
        return True

    call = WebSocketReply("a", send, ResultFrame("json"))
    call.accept(
        LogSubscription(
            LogSource("acme", "r", "s", "f"), discard_record, SubscriptionDeadlines(0, expires_at=9)
        ),
        RequestMetrics.for_resumed("acme"),
        0.5,
    )
    for record in records:
        call.receive_record(record, 0)
    return sent[1:]


def test_embeddings_of_all_records_are_one_result() -> None:
    """In the order of the inputs, with their places."""
    (result,) = frames_of(PART, REST, DONE)
    vectors = [{"index": 0, "embedding": [0.25, 0.75]}, {"index": 1, "embedding": [1.0, 0.0]}]
    assert (result["type"], result["id"], result["data"]) == ("result", "a", vectors)
    assert (result["usage"], result["timing"]) == (DONE["usage"], {"admit": 0.5, "total": 1.0})


def test_rows_with_labels_are_classifications() -> None:
    """The record says so: a client that resumes has told no kind."""
    named = {"labels": ["no", "yes"]}
    (result,) = frames_of(PART | named, REST | named, DONE)
    assert [item["label"] for item in result["data"]] == ["yes", "no"]
    assert result["data"][0]["probs"] == [0.25, 0.75]


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (messages.done_record("cancelled", messages.openai_usage(3, 0), {}), "done"),
        (messages.error_record("deadline_exceeded", "late", messages.openai_usage(3, 0)), "error"),
    ],
)
def test_a_part_is_no_result(end: dict[str, Any], kind: str) -> None:
    """What was cancelled or failed may have stored some of its rows; a client could not tell."""
    (last,) = frames_of(PART, end)
    assert last["type"] == kind
