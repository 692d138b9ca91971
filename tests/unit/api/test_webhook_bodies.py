"""Types of events are named alike wherever they are named."""

from typing import get_args

from api.schemas.webhooks import EventName
from streams.records.webhooks.events import EventType


def test_an_endpoint_may_ask_for_each_type_of_event() -> None:
    """And for no other: a body that names one is refused."""
    assert get_args(EventName) == tuple(EventType)
