"""Deliveries are due endpoint by endpoint, and each once at a time."""

from dataclasses import replace

import pytest

from jobs.webhooks import delivery_queue
from jobs.webhooks.delivery_queue import KEPT_IN_LOG, PER_ENDPOINT, DeliveryQueue
from streams.records.webhooks.delivery_records import (
    DeliveryAttempt,
    DeliveryKey,
    DeliveryStatus,
    WebhookDelivery,
)


def pending(endpoint: str, number: int, due_at: float = 0.0, revision: int = 1) -> WebhookDelivery:
    event = f"evt_{number}"
    return WebhookDelivery(
        "acme", endpoint, event, "batch.completed", b"{}", 0, due_at, revision=revision
    )


def queue_of(*deliveries: WebhookDelivery) -> DeliveryQueue:
    queue = DeliveryQueue()
    for delivery in deliveries:
        queue.note(delivery)
    return queue


def test_an_endpoint_has_a_few_attempts_at_once_whatever_others_have() -> None:
    """An endpoint that never answers holds its own alone."""
    queue = queue_of(*(pending(endpoint, i) for endpoint in "ab" for i in range(10)))
    taken = queue.take_due(1.0)
    assert sorted(key.endpoint for key in taken) == ["a"] * PER_ENDPOINT + ["b"] * PER_ENDPOINT
    assert queue.take_due(1.0) == []
    queue.release(taken[0], is_failing=False)
    assert len(queue.take_due(1.0)) == 1


def test_a_failing_endpoint_has_one_attempt_at_a_time() -> None:
    """Until one is a success."""
    queue = queue_of(*(pending("a", i) for i in range(20)))
    for key in queue.take_due(1.0):
        queue.put_off(key, 100.0)
        queue.release(key, is_failing=True)
    (one,) = queue.take_due(1.0)
    queue.release(one, is_failing=False)
    assert len(queue.take_due(1.0)) == PER_ENDPOINT


def test_what_is_put_off_is_due_then() -> None:
    """And not before, nor twice."""
    queue = queue_of(pending("a", 1))
    (key,) = queue.take_due(1.0)
    queue.put_off(key, 50.0)
    queue.release(key, is_failing=True)
    assert queue.take_due(49.0) == []
    assert queue.take_due(50.0) == [key]
    assert queue.take_due(50.0) == []


def test_an_older_record_than_the_known_one_changes_nothing() -> None:
    """Records are read back after they were written."""
    delivered = replace(pending("a", 1, revision=5), status=DeliveryStatus.DELIVERED)
    queue = queue_of(delivered, pending("a", 1, revision=4))
    assert (len(queue), queue.take_due(1.0)) == (0, [])
    queue.note(pending("a", 1, revision=6))  # asked for again
    assert len(queue.take_due(1.0)) == 1


def test_the_oldest_ended_deliveries_are_dropped_once() -> None:
    """Deliveries that were asked for again since are not."""
    ended = [
        replace(pending("a", i, revision=i + 1), status=DeliveryStatus.FAILED)
        for i in range(KEPT_IN_LOG + 2)
    ]
    queue = queue_of(*ended, pending("a", 0, revision=10_000))
    assert queue.take_outdated() == [2]
    assert queue.take_outdated() == []


def test_an_endpoint_is_full_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are not."""
    monkeypatch.setattr(delivery_queue, "MAX_PENDING", 2)
    queue = queue_of(pending("a", 1), pending("a", 2), pending("b", 1))
    assert queue.is_full("acme", "a")
    assert not queue.is_full("acme", "b")
    queue.forget(DeliveryKey("acme", "a", "evt_1"))
    assert not queue.is_full("acme", "a")


@pytest.mark.parametrize(
    ("status", "next_at", "wanted"),
    [
        (200, None, DeliveryStatus.DELIVERED),
        (204, 9.0, DeliveryStatus.DELIVERED),
        (301, 9.0, DeliveryStatus.PENDING),
        (500, 9.0, DeliveryStatus.PENDING),
        (None, 9.0, DeliveryStatus.PENDING),
        (500, None, DeliveryStatus.FAILED),
        (None, None, DeliveryStatus.FAILED),
    ],
)
def test_an_attempt_ends_a_delivery_or_does_not(
    status: int | None, next_at: float | None, wanted: DeliveryStatus
) -> None:
    """A status of 2xx alone is a success; without a next attempt anything else is its end."""
    tried = pending("a", 1).with_attempt(DeliveryAttempt(0.0, 1, status), next_at)
    assert (tried.status, tried.tries, len(tried.attempts)) == (wanted, 1, 1)
    assert WebhookDelivery.unpack(tried.pack(), 1) == replace(tried, revision=1)


def test_the_attempts_that_are_kept_are_bounded() -> None:
    """Also when a delivery is asked for again and again."""
    delivery = pending("a", 1)
    for number in range(100):
        delivery = delivery.with_attempt(DeliveryAttempt(number, 1, 500), 1.0).redelivered(2.0)
    assert [attempt.at for attempt in delivery.attempts] == list(range(80, 100))
