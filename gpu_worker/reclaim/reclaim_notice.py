"""Notices of metadata services, from the documents of AWS, GCP and Azure. Pure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

# https://cloud.google.com/compute/docs/instances/spot: "up to 30 seconds"
GCP_NOTICE_SECONDS = 30.0


class UnreadableNotice(ValueError):
    """A metadata service has answered with something else than it documents."""


@dataclass(frozen=True)
class ReclaimNotice:
    """A provider's word on this machine.

    At `ends_at`, in epoch seconds, it stops, terminates or hibernates the machine (`action`). A
    hint says that this is likely soon, and binds nobody: `ends_at` is when it was told. `id` is the
    provider's own name of the event, empty if it gives none.
    """

    action: str
    ends_at: float
    id: str = ""
    is_hint: bool = False


def parse_instance_action(document: bytes) -> ReclaimNotice:
    """Return the notice in AWS's `spot/instance-action`; raises `UnreadableNotice`."""
    found = _object(document)
    return ReclaimNotice(_text(found, "action"), _utc_seconds(_text(found, "time")))


def parse_rebalance(document: bytes) -> ReclaimNotice:
    """Return the hint in AWS's `recommendations/rebalance`; raises `UnreadableNotice`."""
    told_at = _utc_seconds(_text(_object(document), "noticeTime"))
    return ReclaimNotice("rebalance", told_at, is_hint=True)


def parse_preempted(document: bytes, now: float) -> ReclaimNotice | None:
    """Return the notice in GCP's `instance/preempted`, None for FALSE; raises `UnreadableNotice`.

    It tells no time: the machine ends 30 s after `now`, which must be when that was heard.
    """
    word = document.strip().upper()
    if word not in (b"TRUE", b"FALSE"):
        raise UnreadableNotice(f"{len(document)} bytes are neither TRUE nor FALSE")
    return ReclaimNotice("preempt", now + GCP_NOTICE_SECONDS) if word == b"TRUE" else None


def parse_scheduled_events(document: bytes, machine: str, now: float) -> ReclaimNotice | None:
    """Return the soonest preemption of `machine` in Azure's scheduled events; None without any.

    An event without a time has started, so that it ends the machine at `now`. Raises
    `UnreadableNotice`.
    """
    preemptions = _preemptions(document, machine, now)
    return min(preemptions, key=lambda notice: notice.ends_at, default=None)


def _preemptions(document: bytes, machine: str, now: float) -> Iterator[ReclaimNotice]:
    events = _object(document).get("Events")
    if not isinstance(events, list):
        raise UnreadableNotice("it has no list `Events`")
    for event in events:
        if not isinstance(event, dict):
            raise UnreadableNotice("one of its events is no object")
        resources = event.get("Resources") or []
        if not isinstance(resources, list):
            raise UnreadableNotice("the resources of an event are no list")
        if event.get("EventType") == "Preempt" and machine in resources:
            not_before = event.get("NotBefore")
            ends_at = _http_seconds(not_before) if not_before else now
            yield ReclaimNotice("preempt", ends_at, _text(event, "EventId"))


def _object(document: bytes) -> dict[str, Any]:
    try:
        found = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise UnreadableNotice(f"{len(document)} bytes are no JSON") from error
    if not isinstance(found, dict):
        raise UnreadableNotice("it is no object")
    return found


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise UnreadableNotice(f"its {key!r} is no text")
    return value


def _utc_seconds(text: str) -> float:
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise UnreadableNotice(f"{text[:40]!r} is no time such as 2026-11-29T08:22:00Z") from error


def _http_seconds(text: object) -> float:
    try:
        return parsedate_to_datetime(str(text)).timestamp()
    except ValueError as error:
        shown = str(text)[:40]
        raise UnreadableNotice(
            f"{shown!r} is no time such as Sun, 29 Nov 2026 08:22:00 GMT"
        ) from error
