"""Bodies of the batches API, as the OpenAI SDK sends it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from api.schemas.fields import Body
from api.schemas.files import ExpiresAfter
from streams.records.jobs.run_hours import RunHours, check_zone

MAX_METADATA = 16
MAX_TIME = 4_102_444_800  # the year 2100 in epoch seconds: no clock computes with much later ones
Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/rerank",
]
MetadataKey = Annotated[str, Field(max_length=64)]
TimeOfDay = Annotated[str, Field(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$")]
MetadataValue = Annotated[str, Field(max_length=512)]


class BatchOptions(Body):
    """Options of a batch: how long it may take, and when it runs.

    `not_before`, in epoch seconds, delays it. `run_between` are two times of day in `time_zone`
    between which lines are published.
    """

    completion_window: str = Field("24h", pattern="^[1-9][0-9]{0,2}[hd]$")
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=MAX_METADATA)
    output_expires_after: ExpiresAfter | None = None
    not_before: int | None = Field(None, ge=0, le=MAX_TIME)
    run_between: list[TimeOfDay] | None = Field(None, min_length=2, max_length=2)
    time_zone: str = Field("UTC", max_length=64)

    @model_validator(mode="after")
    def _check_hours(self) -> Self:
        check_zone(self.time_zone)
        self.run_hours  # noqa: B018  # raises for what is no time
        return self

    @property
    def run_hours(self) -> RunHours | None:
        """The hours in which it may run; None: at any time."""
        if self.run_between is None:
            return None
        start, end = self.run_between
        return RunHours.parse(start, end, self.time_zone)


class CreateBatch(BatchOptions):
    """A batch: which file of requests, for which endpoint, and how it is to run."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: str = Field(pattern="^[1-9][0-9]{0,2}[hd]$")


class EstimateBatch(Body):
    """A file of requests, and the endpoint that they are for."""

    input_file_id: str
    endpoint: Endpoint
