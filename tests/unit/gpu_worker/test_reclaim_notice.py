"""What metadata services say, and what they must not be believed."""

import json
from typing import Any

import pytest

from gpu_worker.reclaim import reclaim_notice
from gpu_worker.reclaim.reclaim_notice import ReclaimNotice, UnreadableNotice

AT = 1505982120.0  # 2017-09-21T08:22:00Z


def azure(**changed: Any) -> bytes:
    event = {
        "EventId": "e1",
        "EventType": "Preempt",
        "Resources": ["vm-a"],
        "NotBefore": "Thu, 21 Sep 2017 08:22:00 GMT",
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [{**event, **changed}]}).encode()


def test_aws_tells_action_and_time() -> None:
    document = b'{"action": "terminate", "time": "2017-09-21T08:22:00Z"}'
    assert reclaim_notice.parse_instance_action(document) == ReclaimNotice("terminate", AT)


def test_a_rebalance_recommendation_is_a_hint() -> None:
    """The machine may run for hours after it, or be taken with its notice alone."""
    found = reclaim_notice.parse_rebalance(b'{"noticeTime": "2017-09-21T08:22:00Z"}')
    assert found.is_hint


def test_gcp_gives_thirty_seconds() -> None:
    assert reclaim_notice.parse_preempted(b"FALSE\n", AT) is None
    assert reclaim_notice.parse_preempted(b"TRUE", AT) == ReclaimNotice("preempt", AT + 30)


@pytest.mark.parametrize(
    ("document", "found"),
    [
        (azure(), ReclaimNotice("preempt", AT, "e1")),
        (azure(NotBefore=""), ReclaimNotice("preempt", AT - 50, "e1")),
        (azure(EventType="Freeze"), None),
        (azure(Resources=["vm-b"]), None),
        (azure(Resources=None), None),
        (b'{"DocumentIncarnation": 1, "Events": []}', None),
    ],
)
def test_azure_tells_of_all_machines_of_a_set(document: bytes, found: ReclaimNotice | None) -> None:
    """An event that has started has no time any more."""
    assert reclaim_notice.parse_scheduled_events(document, "vm-a", AT - 50) == found


def test_the_soonest_event_counts() -> None:
    later = json.loads(azure(EventId="e2", NotBefore="Thu, 21 Sep 2017 08:23:00 GMT"))
    both = {"Events": [*later["Events"], *json.loads(azure())["Events"]]}
    found = reclaim_notice.parse_scheduled_events(json.dumps(both).encode(), "vm-a", AT)
    assert found
    assert found.id == "e1"


@pytest.mark.parametrize(
    "document",
    [
        *(b"", b"\xff", b"[]", b"7", b"{}", b"[" * 5000),
        b'{"action": 3, "time": "2017-09-21T08:22:00Z"}',
        b'{"action": "stop", "time": "soon"}',
        b'{"action": "stop", "time": null}',
    ],
)
def test_garbage_is_no_notice(document: bytes) -> None:
    """A worker that took it for one would leave for nothing."""
    with pytest.raises(UnreadableNotice):
        reclaim_notice.parse_instance_action(document)
    with pytest.raises(UnreadableNotice):
        reclaim_notice.parse_rebalance(document)
    with pytest.raises(UnreadableNotice):
        reclaim_notice.parse_preempted(document, AT)
    with pytest.raises(UnreadableNotice):
        reclaim_notice.parse_scheduled_events(document, "vm-a", AT)


@pytest.mark.parametrize(
    "document",
    [
        azure(NotBefore="soon"),
        azure(NotBefore=7),
        azure(EventId=None),
        azure(Resources=7),
        b'{"Events": [3]}',
        b'{"Events": {"a": 1}}',
    ],
)
def test_an_event_that_cannot_be_read_is_an_error(document: bytes) -> None:
    with pytest.raises(UnreadableNotice):
        reclaim_notice.parse_scheduled_events(document, "vm-a", AT)
