"""Settings of `millstream jobs`."""

from typing import Annotated

from pydantic import Field

from api.batches.input_lines import MAX_LINES
from jobs.webhooks.retry_schedule import RETRY_SECONDS
from registry.webhook_policy import WebhookSettings
from streams.base_settings import ServiceSettings

RetrySeconds = Annotated[float, Field(gt=0)]


class JobsSettings(ServiceSettings, WebhookSettings):
    """Settings of one jobs process."""

    user_class = "jobs"

    batch_window: int = Field(
        512, ge=1, le=1024, description="requests of one batch that are under way at once"
    )
    max_batch_lines: int = Field(
        100_000, ge=1, le=MAX_LINES, description="most lines of a batch's input"
    )
    webhook_retry_seconds: tuple[RetrySeconds, ...] = Field(
        RETRY_SECONDS,
        description="seconds from each failed attempt at a webhook to the next; repeatable",
    )
