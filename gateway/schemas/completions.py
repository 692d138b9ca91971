"""Bodies of /v1/completions and /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gateway.schemas.chats import Chat
from gateway.schemas.fields import (
    MAX_LOGPROBS,
    Body,
    Count,
    Ignored,
    No,
    Nothing,
    NothingListed,
    One,
    Only,
    Prompt,
)
from gateway.schemas.generation import Generation
from streams.errors import BadRequest
from streams.subjects import Priority

ServiceTier = Literal["auto", "default", "flex", "priority"]
NoSuffix = Annotated[Any, Only(None, "")]
OnlyTextModality = Annotated[Any, Only(None, ["text"])]
NoTools = Annotated[Any, Only(None, "auto", "none")]
_LANES = {"priority": Priority.INTERACTIVE, "flex": Priority.BATCH}


class StreamOptions(Body):
    """What a stream shall contain besides the text."""

    include_usage: bool | None = Field(default=None, description="usage in a last chunk of its own")
    include_obfuscation: Ignored = None


class OpenAIGeneration(Generation):
    """What both of OpenAI's generating endpoints take."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    n: One = None
    metadata: Ignored = None
    parallel_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    store: Ignored = None
    user: Ignored = None

    @model_validator(mode="after")
    def _streams_what_has_options(self) -> "OpenAIGeneration":
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only for stream: true", "stream_options")
        return self

    @property
    def lane(self) -> Priority:
        """The priority that was named, else the one of the service tier."""
        if self.priority:
            return Priority(self.priority)
        return _LANES.get(self.service_tier or "default", Priority.STANDARD)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(OpenAIGeneration):
    """A text to continue."""

    prompt: Prompt
    max_tokens: Count | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: One = None
    echo: No = None
    suffix: NoSuffix = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(OpenAIGeneration):
    """A chat to answer."""

    messages: Chat
    max_tokens: Count | None = Field(default=None, description="as max_completion_tokens")
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    modalities: OnlyTextModality = None
    tool_choice: NoTools = None
    function_call: NoTools = None
    tools: NothingListed = None
    functions: NothingListed = None
    audio: Nothing = None
    prediction: Nothing = None
    reasoning_effort: Nothing = None
    verbosity: Nothing = None
    web_search_options: Nothing = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs is only for logprobs: true", "top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise BadRequest("max_tokens and max_completion_tokens differ", "max_tokens")
        return self

    @property
    def prompt(self) -> None:
        return None

    @property
    def chat(self) -> list[dict[str, str]]:
        return [message.plain() for message in self.messages]

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
