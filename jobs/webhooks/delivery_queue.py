"""Queue of deliveries that are due, one for each endpoint, so that none waits for another's. Pure.

It has names and times alone; the records are read when their time has come.
"""

import heapq
from collections import deque

from streams.records.webhooks.delivery_records import (
    DeliveryKey,
    DeliveryStatus,
    WebhookDelivery,
)

PER_ENDPOINT = 4  # attempts that run at once; one while the endpoint fails
KEPT_IN_LOG = 200  # ended deliveries of an endpoint
MAX_PENDING = 10_000  # deliveries of an endpoint

EndpointKey = tuple[str, str]  # tenant, endpoint


class DeliveryQueue:
    """All pending deliveries, with those that are under way, and the ended ones that are kept."""

    def __init__(self) -> None:
        self._endpoints: dict[EndpointKey, _EndpointQueue] = {}

    def __len__(self) -> int:
        """The number of pending deliveries."""
        return sum(len(each.due_at) for each in self._endpoints.values())

    def note(self, delivery: WebhookDelivery) -> None:
        """Take over a record as it is stored now; an older revision than a known one is ignored."""
        self._find(delivery.key).note(delivery)

    def put_off(self, key: DeliveryKey, until: float) -> None:
        """Try a pending delivery at `until`, in epoch seconds, and not before."""
        self._find(key).put_off(key.event, until)

    def forget(self, key: DeliveryKey) -> None:
        """Drop a delivery whose record is gone."""
        self._find(key).forget(key.event)

    def is_full(self, tenant: str, endpoint: str) -> bool:
        """Return whether an endpoint has as many pending deliveries as it may."""
        found = self._endpoints.get((tenant, endpoint))
        return found is not None and len(found.due_at) >= MAX_PENDING

    def take_due(self, now: float) -> list[DeliveryKey]:
        """Return the deliveries to try now, and count them as under way until `release`."""
        return [
            DeliveryKey(*names, event)
            for names, endpoint in self._endpoints.items()
            for event in endpoint.take_due(now)
        ]

    def release(self, key: DeliveryKey, *, is_failing: bool) -> None:
        """Count an attempt as ended, and whether its endpoint takes webhooks at the moment."""
        endpoint = self._find(key)
        endpoint.under_way.discard(key.event)
        endpoint.is_failing = is_failing

    def take_outdated(self) -> list[int]:
        """Return the revisions of ended deliveries beyond those that are kept, each once."""
        return [old for each in self._endpoints.values() for old in each.take_outdated()]

    def _find(self, key: DeliveryKey) -> "_EndpointQueue":
        return self._endpoints.setdefault((key.tenant, key.endpoint), _EndpointQueue())


class _EndpointQueue:
    """One endpoint's deliveries by their events."""

    def __init__(self) -> None:
        self.due_at: dict[str, float] = {}
        self.under_way: set[str] = set()
        self.is_failing = False
        self._heap: list[tuple[float, str]] = []
        self._revisions: dict[str, int] = {}
        self._ended: deque[tuple[str, int]] = deque()

    def note(self, delivery: WebhookDelivery) -> None:
        event = delivery.event
        if delivery.revision <= self._revisions.get(event, 0):
            return
        self._revisions[event] = delivery.revision
        if delivery.status is DeliveryStatus.PENDING:
            self.put_off(event, delivery.due_at)
        else:
            self.due_at.pop(event, None)
            self._ended.append((event, delivery.revision))

    def forget(self, event: str) -> None:
        self.due_at.pop(event, None)
        self._revisions.pop(event, None)

    def put_off(self, event: str, until: float) -> None:
        self.due_at[event] = until
        heapq.heappush(self._heap, (until, event))

    def take_due(self, now: float) -> list[str]:
        taken: list[str] = []
        held: list[tuple[float, str]] = []
        room = (1 if self.is_failing else PER_ENDPOINT) - len(self.under_way)
        while len(taken) < room and self._heap and self._heap[0][0] <= now:
            due, event = heapq.heappop(self._heap)
            if self.due_at.get(event) != due:
                continue  # it has ended, or another time was set
            if event in self.under_way:
                held.append((due, event))
                continue
            taken.append(event)
            self.under_way.add(event)
        for entry in held:
            heapq.heappush(self._heap, entry)
        return taken

    def take_outdated(self) -> list[int]:
        outdated: list[int] = []
        while len(self._ended) > KEPT_IN_LOG:
            event, revision = self._ended.popleft()
            if self._revisions.get(event) == revision:
                del self._revisions[event]
                outdated.append(revision)
        return outdated
