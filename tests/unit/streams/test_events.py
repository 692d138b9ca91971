"""Events that webhooks are told of: one id and one subject for each."""

import orjson
import pytest

from streams import job_subjects
from streams.records.quota_thresholds import QuotaThreshold
from streams.records.webhooks.events import EventType, WebhookEvent, event_id

ENDED = WebhookEvent("acme", EventType.BATCH_COMPLETED, "batch_0123")


def test_an_event_is_openais() -> None:
    """Thin: it names the object, which is then read with a key."""
    assert orjson.loads(ENDED.encode(1_700_000_000.7)) == {
        "id": event_id(ENDED.subject),
        "object": "event",
        "created_at": 1_700_000_000,
        "type": "batch.completed",
        "data": {"id": "batch_0123"},
    }


def test_whoever_notes_an_event_gives_it_the_same_id() -> None:
    """Else a repetition after a crash would be another event; others have other ids."""
    again = orjson.loads(ENDED.encode(1_800_000_000))["id"]
    others = [
        WebhookEvent("other", EventType.BATCH_COMPLETED, "batch_0123"),
        WebhookEvent("acme", EventType.BATCH_FAILED, "batch_0123"),
        WebhookEvent("acme", EventType.BATCH_COMPLETED, "batch_0124"),
    ]
    assert again == orjson.loads(ENDED.encode(0))["id"]
    assert len({again, *(event_id(each.subject) for each in others)}) == 4


@pytest.mark.parametrize("kind", EventType)
def test_each_type_has_a_subject_in_the_stream(kind: EventType) -> None:
    """The stream has subjects of as many words as each type makes."""
    found = job_subjects.event("acme", kind, "batch_0123").split(".")
    assert len(found) == len(job_subjects.ALL_EVENTS.split("."))


def test_a_threshold_is_an_event_of_the_same_shape() -> None:
    """With an id without dots, which a signature could not tell from its other parts."""
    reached = QuotaThreshold("acme", "tenant", "tokens_per_day", "2026-11-21", 50, 100, 50)
    body = orjson.loads(reached.encode(0))
    assert (body["object"], body["type"]) == ("event", "quota.threshold_reached")
    assert body["id"].startswith("evt_")
    assert "." not in body["id"]
    assert body["data"]["percent"] == 50
