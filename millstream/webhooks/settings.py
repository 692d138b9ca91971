"""Settings of the commands `millstream webhooks …`."""

from pydantic import Field

from api.schemas.webhooks import EventName
from streams.base_settings import FLAG_ONLY, POSITIONAL, GatewayClientSettings, LogLevel


class WebhookCommandSettings(GatewayClientSettings):
    """Settings of all commands on webhook endpoints; the key needs the scope `jobs`."""

    log_level: LogLevel = Field("error", description="least severe log event to write")
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class CreateEndpointSettings(WebhookCommandSettings):
    """Settings of `millstream webhooks create`."""

    target: str = Field(
        description="https:// URL to which events are posted", json_schema_extra=POSITIONAL
    )
    name: str = Field("webhook", description="name for people", json_schema_extra=FLAG_ONLY)
    event: tuple[EventName, ...] = Field(
        (),
        description="type of event to be told of, such as batch.completed; repeatable; all if not "
        "given",
        json_schema_extra=FLAG_ONLY,
    )


class OneEndpointSettings(WebhookCommandSettings):
    """Settings of the commands on one endpoint."""

    id: str = Field(description="id of the endpoint", json_schema_extra=POSITIONAL)


class TestEndpointSettings(OneEndpointSettings):
    """Settings of `millstream webhooks test`."""

    event: EventName = Field(
        "batch.completed", description="type of the sample event", json_schema_extra=FLAG_ONLY
    )


class DeliveriesSettings(OneEndpointSettings):
    """Settings of `millstream webhooks deliveries`."""

    limit: int = Field(
        100, ge=1, le=1000, description="most deliveries to show", json_schema_extra=FLAG_ONLY
    )
    after: str = Field(
        "", description="event after which to go on, in the same order", json_schema_extra=FLAG_ONLY
    )


class RedeliverSettings(WebhookCommandSettings):
    """Settings of `millstream webhooks redeliver`."""

    id: str = Field(description="id of the endpoint", json_schema_extra=POSITIONAL)
    delivery: str = Field(description="id of the event to send", json_schema_extra=POSITIONAL)


class RotateSecretSettings(OneEndpointSettings):
    """Settings of `millstream webhooks rotate`."""

    keep_old: bool = Field(
        False,
        description="have the old secret sign for another 24 hours",
        json_schema_extra=FLAG_ONLY,
    )
