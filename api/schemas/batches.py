"""Body of the batches API, as the OpenAI SDK sends it."""

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.fields import Body
from api.schemas.files import ExpiresAfter

MAX_METADATA = 16
Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/rerank",
]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class CreateBatch(Body):
    """A batch: which file of requests, for which endpoint, and how long it may take.

    `not_before`, in epoch seconds, delays it.
    """

    input_file_id: str
    endpoint: Endpoint
    completion_window: str = Field(pattern="^[1-9][0-9]{0,2}[hd]$")
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=MAX_METADATA)
    output_expires_after: ExpiresAfter | None = None
    not_before: int | None = Field(None, ge=0)
