"""Settings of `millstream jobs`."""

from pydantic import Field

from api.batches.input_lines import MAX_LINES
from streams.base_settings import ServiceSettings


class JobsSettings(ServiceSettings):
    """Settings of one jobs process."""

    batch_window: int = Field(
        512, ge=1, le=1024, description="requests of one batch that are under way at once"
    )
    max_batch_lines: int = Field(
        100_000, ge=1, le=MAX_LINES, description="most lines of a batch's input"
    )
