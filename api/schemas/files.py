"""Bodies of the uploads API, as the OpenAI SDK sends them."""

from typing import Literal, get_args

from pydantic import Field

from api.schemas.fields import Body

MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 30 * 86_400
MAX_FILENAME = 255  # characters, as file systems have them
MAX_PARTS = 1000
Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
PURPOSES: tuple[str, ...] = get_args(Purpose)


class ExpiresAfter(Body):
    """Expiry of a file: so many seconds after it was created."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)


class CreateUpload(Body):
    """A file that is to be sent in parts."""

    filename: str = Field(min_length=1, max_length=MAX_FILENAME)
    purpose: Purpose
    bytes: int = Field(ge=1)
    mime_type: str = Field(max_length=MAX_FILENAME)
    expires_after: ExpiresAfter | None = None


class CompleteUpload(Body):
    """The parts of an upload in the order in which they make up the file."""

    part_ids: list[str] = Field(min_length=1, max_length=MAX_PARTS)
    md5: str | None = Field(None, pattern="^[0-9a-fA-F]{32}$")
