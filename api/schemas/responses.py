"""Body of /v1/responses, and the items of which its input and its output consist."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    TypeAdapter,
    WithJsonSchema,
)
from pydantic import model_validator as check

from api.schemas.batches import MAX_METADATA, MetadataKey, MetadataValue
from api.schemas.chat_messages import MAX_MESSAGES
from api.schemas.completions import (
    MediumVerbosity,
    ReasoningEffort,
    ServiceTier,
)
from api.schemas.fields import (
    MAX_LOGPROBS,
    Body,
    Count,
    Ignored,
    InferenceBody,
    JsonObject,
    OnlyNull,
    OnlyNullOrEmpty,
    OnlyValues,
    describe_value,
    unsupported_value,
    wrong_value,
)
from api.schemas.text_content import TextParts, parse_text_content
from api.schemas.tools import MAX_TOOLS
from streams.errors import BadRequest

Role = Literal["system", "developer", "user", "assistant"]
_TEXT_FIELDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_BESIDE_TEXT = {"annotations", "logprobs", "prompt_cache_breakpoint"}
OUTPUT_LOGPROBS = "message.output_text.logprobs"


def _parse_content(value: object) -> str | TextParts:
    return parse_text_content(value, _TEXT_FIELDS, _BESIDE_TEXT)


_PART = {
    "type": "object",
    "properties": {"type": {"enum": [*_TEXT_FIELDS]}, "text": {"type": "string"}},
    "required": ["type"],
}
Content = Annotated[
    str | TextParts,
    PlainValidator(_parse_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


class MessageItem(Body):
    """A message of somebody, as a client writes it or as an earlier response has it."""

    type: Literal["message"] = "message"
    role: Role
    content: Content
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class FunctionCallItem(Body):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Ignored = None
    status: Ignored = None
    parsed_arguments: Ignored = None
    caller: OnlyNull = None
    namespace: OnlyNull = None
    async_: OnlyNull = None  # as the SDK's `model_dump` spells it


class FunctionOutputItem(Body):
    """The result of a call, from the client."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: Ignored = None
    status: Ignored = None


_KINDS = ("message", "function_call", "function_call_output")


def _check_kind(value: object) -> object:
    kind = _kind_of(value)
    if isinstance(value, dict) and kind not in _KINDS:
        raise unsupported_value(
            f"has the type {describe_value(kind)}, only {', '.join(_KINDS)} are supported"
        )
    return value


def _kind_of(value: object) -> object:
    if isinstance(value, dict):
        return value.get("type", "message")
    return getattr(value, "type", "message")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_kind_of),
    BeforeValidator(_check_kind),
]


ItemList: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def _parse_input(value: object) -> object:
    """Return the items of an input, which may be the text of one message of a user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[
    list[Item],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_parse_input),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}, "maxItems": MAX_MESSAGES},
            ]
        }
    ),
]


class FunctionTool(Body):
    """A function that the model may call; functions are the only kind of tool."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: JsonObject | None = Field(default=None, description="a JSON schema")
    strict: bool | None = None


def _check_tool(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported_value(
            f"has the type {describe_value(kind)}, only 'function' is supported"
        )
    return value


Tools = Annotated[
    list[Annotated[FunctionTool, BeforeValidator(_check_tool)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


def _parse_choice(value: object) -> str | dict[str, str]:
    match value:
        case None:
            return "auto"
        case "none" | "auto" | "required":
            return str(value)
        case {"type": "function", "name": str(name), **rest} if not rest:
            return {"type": "function", "name": name}
        case {"type": str(kind)} if kind != "function":
            raise unsupported_value(
                f"has the type {describe_value(kind)}, only 'function' is supported"
            )
    raise wrong_value(
        f"must be 'none', 'auto', 'required' or a named function, not {describe_value(value)}"
    )


ToolChoice = Annotated[
    str | dict[str, str],
    PlainValidator(_parse_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}),
]


class TextFormat(Body):
    """The form of the text: any, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @check(mode="after")
    def _check_schema(self) -> "TextFormat":
        needed = self.type == "json_schema"
        if (self.json_schema is not None) != needed or (needed and self.name is None):
            field = "text.format.schema"
            raise BadRequest("a schema and its name are for the type 'json_schema' alone", field)
        return self


class TextOptions(Body):
    """OpenAI's `text`: the form of the text."""

    format: TextFormat | None = None
    verbosity: MediumVerbosity = None


class Reasoning(Body):
    """OpenAI's `reasoning`: how much a model should think, where its chat template reads it."""

    effort: ReasoningEffort | None = None
    summary: OnlyNull = None
    generate_summary: OnlyNull = None


class ResponseStreamOptions(Body):
    """OpenAI's `stream_options`, of which none has an effect."""

    include_obfuscation: Ignored = None


class ResponseRequest(InferenceBody):
    """Body of /v1/responses: what to answer, and how."""

    input: Input
    instructions: str | None = Field(
        default=None, description="a system message before the input; not inherited"
    )
    previous_response_id: str | None = None
    store: bool | None = Field(default=None, description="true by default")
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: list[Annotated[Any, OnlyValues(OUTPUT_LOGPROBS)]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    service_tier: ServiceTier | None = None
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=MAX_METADATA)
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto: the first items of a conversation that is too long go"
    )
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    conversation: OnlyNull = None
    prompt: OnlyNull = None
    max_tool_calls: OnlyNull = None
    moderation: OnlyNull = None
    context_management: OnlyNullOrEmpty = None
    access_programs: OnlyNull = None
    image: OnlyNull = None

    @check(mode="after")
    def _check_background(self) -> "ResponseRequest":
        if self.background and self.store is False:
            raise BadRequest("a background response is stored: store must not be false", "store")
        if not self.input and not self.previous_response_id:
            raise BadRequest("input must not be empty", "input")
        return self

    @property
    def is_stored(self) -> bool:
        """True if the response can be read later, and continued."""
        return self.store is not False

    @property
    def tells_logprobs(self) -> bool:
        """True if texts come with log probabilities."""
        return bool(self.include) or self.top_logprobs is not None
