"""Frames that clients send over the WebSocket, and bodies that NATS producers submit."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from api.schemas.chat_messages import Chat
from api.schemas.classify_rerank import ClassificationBody
from api.schemas.embeddings import EmbeddingBody
from api.schemas.fields import MAX_LOGPROBS, Body, Count, Prompt
from api.schemas.generation import GenerationBody
from api.schemas.tools import Tools
from streams.errors import BadRequest

MAX_ID = 128
MAX_IDEMPOTENCY_KEY = 256
FrameId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]
RequestId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
IdempotencyKey = Annotated[str, Field(min_length=1, max_length=MAX_IDEMPOTENCY_KEY)]


class GenerateSubmission(GenerationBody):
    """A request to generate text: either a prompt to continue or messages to answer, never both."""

    prompt: Prompt | None = None
    messages: Chat | None = None
    tools: Tools | None = None
    max_tokens: Count | None = None
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="send log probabilities, with this many alternatives per token",
    )

    @model_validator(mode="after")
    def _check_prompt_or_messages(self) -> "GenerateSubmission":
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give either prompt or messages", "prompt")
        if self.tools and self.messages is None:
            raise BadRequest("tools are for messages", "tools")
        return self

    @property
    def template_messages(self) -> list[dict[str, Any]] | None:
        return [message.to_template() for message in self.messages] if self.messages else None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return [tool.to_template() for tool in self.tools] if self.tools else None

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        return self.logprobs


class EmbedSubmission(EmbeddingBody):
    """A request for embeddings of texts or of lists of token ids."""


class ClassifySubmission(ClassificationBody):
    """A request to classify texts or lists of token ids."""


class GenerateFrame(GenerateSubmission):
    """Starts a generation. The client chooses `id`, which marks all frames about this request."""

    type: Literal["generate"]
    id: FrameId
    idempotency_key: IdempotencyKey | None = None


class EmbedFrame(EmbedSubmission):
    """Starts an embedding. The client chooses `id`, which marks all frames about this request."""

    type: Literal["embed"]
    id: FrameId
    idempotency_key: IdempotencyKey | None = None


class ClassifyFrame(ClassifySubmission):
    """Starts a classification. The client chooses `id`, which marks all frames about it."""

    type: Literal["classify"]
    id: FrameId
    idempotency_key: IdempotencyKey | None = None


class CancelFrame(Body):
    """Cancels the request that was started under this `id` on the same socket."""

    type: Literal["cancel"]
    id: FrameId


class ResumeFrame(Body):
    """Asks for the output of a request from an earlier socket, under a new `id`.

    The output begins with the token after index `after`; -1 asks for all of it. With `characters`,
    the number of Unicode characters in the text received so far, it begins exactly there. Without,
    the chunk that has the token `after` comes again whole if it has later tokens too, and so does
    text that came behind the last token. `request_id` is the one that the earlier socket's
    `accepted` frame named.
    """

    type: Literal["resume"]
    id: FrameId
    request_id: RequestId
    after: int = Field(ge=-1, lt=2**31)
    characters: int | None = Field(None, ge=0, lt=2**31)


WorkFrame = GenerateFrame | EmbedFrame | ClassifyFrame
Frame = WorkFrame | CancelFrame | ResumeFrame
FRAMES: dict[str, type[Frame]] = {
    "generate": GenerateFrame,
    "embed": EmbedFrame,
    "classify": ClassifyFrame,
    "cancel": CancelFrame,
    "resume": ResumeFrame,
}

SubmissionBody = GenerateSubmission | EmbedSubmission | ClassifySubmission
SUBMISSIONS: dict[str, type[SubmissionBody]] = {
    "generate": GenerateSubmission,
    "embed": EmbedSubmission,
    "classify": ClassifySubmission,
}
