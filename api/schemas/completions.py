"""Bodies of /v1/completions and /v1/chat/completions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from api.chat_template import RESERVED_NAMES
from api.schemas.chat_messages import Chat
from api.schemas.fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_N,
    Body,
    Count,
    Ignored,
    OnlyEmptyObject,
    OnlyFalse,
    OnlyNull,
    OnlyNullOrEmpty,
    OnlyOne,
    OnlyTrue,
    OnlyValues,
    Prompts,
    TokenIds,
    check_plain_json,
    wrong_value,
)
from api.schemas.generation import GenerationBody
from api.schemas.tools import (
    Function,
    NamedToolChoice,
    ToolChoice,
    Tools,
    arguments_grammar,
    calls_grammar,
)
from streams.errors import BadRequest, UnsupportedValue
from streams.messages import Grammar
from streams.subjects import Priority

ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
ChoiceCount = Annotated[int, Field(ge=1, le=MAX_N)]
NoSuffix = Annotated[Any, OnlyValues(None, "")]
OnlyTextModality = Annotated[Any, OnlyValues(None, ["text"])]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
MediumVerbosity = Annotated[Any, OnlyValues(None, "medium")]
NoFunctionCall = Annotated[Any, OnlyValues(None, "auto", "none")]
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
_TIER_PRIORITIES = {"priority": Priority.INTERACTIVE, "flex": Priority.BATCH}


def _check_template_options(options: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(name for name in options if name in RESERVED_NAMES or name.startswith("_")):
        raise wrong_value(f"may not set {taken[0]!r}")
    return check_plain_json(options)


TemplateOptions = Annotated[dict[str, Any], AfterValidator(_check_template_options)]


class StreamOptions(Body):
    """OpenAI's `stream_options`: what a stream contains besides the text."""

    include_usage: bool | None = Field(
        default=None, description="send the usage in a last chunk of its own"
    )
    include_obfuscation: Ignored = None


class OpenAIGenerationBody(GenerationBody):
    """Base of the bodies of /v1/completions and /v1/chat/completions: the fields that both have."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    n: ChoiceCount | None = Field(default=None, description="number of answers to each prompt")
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    store: Ignored = None
    user: Ignored = None

    # vLLM's: without effect, or taken only at the value that changes nothing
    spaces_between_special_tokens: Ignored = None
    cache_salt: Ignored = None
    request_id: Ignored = None
    prediction: Ignored = None
    add_special_tokens: OnlyTrue = None
    detokenize: OnlyTrue = None
    bad_words: OnlyNullOrEmpty = None
    allowed_token_ids: OnlyNull = None
    include_stop_str_in_output: OnlyFalse = None
    return_tokens_as_token_ids: OnlyFalse = None
    return_token_ids: OnlyFalse = None
    use_beam_search: OnlyFalse = None
    length_penalty: OnlyOne = None
    prompt_logprobs: OnlyNull = None
    truncate_prompt_tokens: OnlyNull = None
    logits_processors: OnlyNullOrEmpty = None
    guided_grammar: OnlyNull = None
    guided_whitespace_pattern: OnlyNull = None
    guided_decoding_backend: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _rename_guided(cls, value: Any) -> Any:
        """Move vLLM's older `guided_json`, `_regex` and `_choice` into `structured_outputs`."""
        if not isinstance(value, dict) or not any(map(value.__contains__, _GUIDED)):
            return value
        guided = {new: value[old] for old, new in _GUIDED.items() if value.get(old) is not None}
        rest = {name: each for name, each in value.items() if name not in _GUIDED}
        if guided and rest.get("structured_outputs") is not None:
            raise BadRequest("guided_… and structured_outputs cannot be combined", min(_GUIDED))
        return {**rest, "structured_outputs": guided} if guided else rest

    @model_validator(mode="after")
    def _check_stream_options(self) -> "OpenAIGenerationBody":
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only for stream: true", "stream_options")
        return self

    if TYPE_CHECKING:  # a field of one, a property of the other

        @property
        def prompts(self) -> Sequence[str | TokenIds | None]:
            """The prompts to continue, each a request of its own.

            For a chat it is a list of one None, since `messages` takes the place of the prompt.
            """

    @property
    def choice_count(self) -> int:
        """The number of answers (`n`) that each prompt is to get; 1 if the body does not say."""
        return self.n or 1

    @property
    def lane_priority(self) -> Priority:
        """The priority with which the request is queued: the body's `priority`, if it has one.

        Without `priority`, `service_tier` decides: `priority` means interactive, `flex` means
        batch, and any other tier means standard.
        """
        if self.priority:
            return Priority(self.priority)
        return _TIER_PRIORITIES.get(self.service_tier or "default", Priority.STANDARD)

    @property
    def include_usage(self) -> bool:
        """True if a stream must end with a chunk that has the token counts (`usage`)."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(OpenAIGenerationBody):
    """Body of /v1/completions: one or more prompts to continue."""

    prompts: Prompts = Field(alias="prompt")
    max_tokens: Count | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(default=None, description="only 1 or `n`")
    echo: OnlyFalse = None
    suffix: NoSuffix = None

    @model_validator(mode="after")
    def _check_choice_count(self) -> "CompletionRequest":
        if self.best_of not in (None, 1, self.n):
            raise UnsupportedValue(f"best_of {self.best_of} is not supported, only n is", "best_of")
        count = self.choice_count * len(self.prompts)
        if count > MAX_CHOICES:
            raise BadRequest(f"n times the prompts is {count}, at most {MAX_CHOICES}", "prompt")
        return self

    @property
    def prompt(self) -> str | TokenIds:
        return self.prompts[0]

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(OpenAIGenerationBody):
    """Body of /v1/chat/completions: a chat to answer."""

    messages: Chat
    max_tokens: Count | None = Field(default=None, description="as max_completion_tokens")
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    modalities: OnlyTextModality = None
    tools: Tools | None = Field(
        default=None, description="only if the model's chat template supports tools"
    )
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    function_call: NoFunctionCall = None
    functions: OnlyNullOrEmpty = None
    audio: OnlyNull = None
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="for chat templates that read it"
    )
    verbosity: MediumVerbosity = None
    web_search_options: OnlyNull = None
    moderation: OnlyNull = None
    add_special_tokens: OnlyFalse = None  # the template writes them itself
    add_generation_prompt: OnlyTrue = None
    continue_final_message: OnlyFalse = None
    echo: OnlyFalse = None
    chat_template: OnlyNull = None
    chat_template_kwargs: TemplateOptions | None = Field(
        default=None, description="variables for the model's chat template"
    )
    documents: OnlyNullOrEmpty = None
    mm_processor_kwargs: OnlyEmptyObject = None
    include_reasoning: Ignored = None

    @model_validator(mode="after")
    def _check_contradictions(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs is only for logprobs: true", "top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise BadRequest("max_tokens and max_completion_tokens differ", "max_tokens")
        return self

    @model_validator(mode="after")
    def _check_forced_tools(self) -> "ChatRequest":
        if self.forces_tools and not self.forced_functions:
            raise BadRequest("tool_choice names no function of tools", "tool_choice")
        if self.forces_tools and super().grammar:
            reason = f"a forced tool call cannot also follow {super().grammar_field}"
            raise BadRequest(reason, "tool_choice")
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the prompt tells the model of, in the shape that chat templates expect.

        None if the body has no tools, or forbids calls with a `tool_choice` of `none`.
        """
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.to_template() for tool in self.tools]

    @property
    def offered_names(self) -> frozenset[str]:
        """The names of all functions in `tools`; a call of any other one is treated as text."""
        return frozenset(tool.function.name for tool in self.tools or ())

    @property
    def forces_tools(self) -> bool:
        """True if `tool_choice` is `required` or names a function: a call is compulsory."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def forced_functions(self) -> list[Function]:
        """The functions of which the answer must call one; use it only if `forces_tools` is True.

        The list has the named function alone, or all functions of `tools` if any of them may be
        called. The list is empty if `tool_choice` names a function that `tools` does not have.
        """
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedToolChoice):
            return [each for each in functions if each.name == self.tool_choice.name][:1]
        return functions

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that constrains the output; None if any text is allowed.

        If a tool call is forced, it is the grammar of that call, else the one that the client asked
        for.
        """
        if not self.forces_tools:
            return super().grammar
        if isinstance(self.tool_choice, NamedToolChoice):
            return arguments_grammar(self.forced_functions[0])
        return calls_grammar(self.forced_functions, self.parallel_tool_calls is not False)

    @property
    def grammar_field(self) -> str:
        return "tools" if self.forces_tools else super().grammar_field

    @property
    def prompts(self) -> list[None]:
        return [None]

    @property
    def prompt(self) -> None:
        return None

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        return [message.to_template() for message in self.messages]

    @property
    def template_options(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            options["enable_thinking"] = False
        return {**options, **(self.chat_template_kwargs or {})}

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
