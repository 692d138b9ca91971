"""Bodies of the webhook endpoints API, as the OpenAI SDK sends them."""

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.fields import MAX_NAME, Body
from registry.webhook_policy import MAX_URL

EventName = Literal[
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
    "quota.threshold_reached",
]
EndpointName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Url = Annotated[str, Field(min_length=1, max_length=MAX_URL)]
EventNames = Annotated[list[EventName], Field(min_length=1, max_length=32)]


class CreateWebhookEndpoint(Body):
    """A new endpoint: where it is, and which events it is told of."""

    name: EndpointName
    url: Url
    event_types: EventNames


class UpdateWebhookEndpoint(Body):
    """Changes of an endpoint; `enabled` is ours."""

    name: EndpointName | None = None
    url: Url | None = None
    event_types: EventNames | None = None
    enabled: bool | None = None


class RotateWebhookSecret(Body):
    """Option of a rotation: the old secret may sign for another day."""

    keep_old_secret_active_for_24_hours: bool = False


class TestWebhookEndpoint(Body):
    """Type of the sample event."""

    event_type: EventName
