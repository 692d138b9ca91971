"""Sampling fields that every generation shares, named as by OpenAI and, some, by vLLM."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from api.schemas.fields import INT32, InferenceBody, LogitBias, Seed, Stops, StopTokenIds, TokenIds
from api.schemas.structured_outputs import ResponseFormat, StructuredOutputs
from streams.errors import BadRequest
from streams.messages import GREEDY_BELOW, Grammar, Sampling

Penalty = Annotated[float, Field(ge=-2, le=2)]


class GenerationBody(InferenceBody):
    """Base of all requests to generate text: how tokens are chosen, and when the output stops."""

    temperature: float | None = Field(
        default=None, ge=0, le=2, description="below 0.00001 as 0: always the likeliest token"
    )
    top_p: float | None = Field(
        default=None, ge=0, le=1, description="0: always the likeliest token"
    )
    top_k: int | None = Field(default=None, ge=-1, lt=INT32, description="0 or -1: off")
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="drop tokens less likely than this times the likeliest",
    )
    repetition_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="1: off; counts prompt and output"
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias = Field(default=[])
    seed: Seed | None = None
    stop: Stops = Field(default=[])
    ignore_eos: bool | None = Field(
        default=None, description="do not stop at the model's end token, but at max_tokens"
    )

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    min_tokens: int | None = Field(
        default=None, ge=0, lt=INT32, description="no end of the model's own before so many tokens"
    )
    stop_token_ids: StopTokenIds = Field(
        default=[], description="tokens that end the output, besides the model's end token"
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="false: the text contains the model's control tokens"
    )

    @model_validator(mode="after")
    def _check_one_grammar(self) -> "GenerationBody":
        if self.structured_outputs and self.response_format and self.response_format.grammar:
            raise BadRequest(
                "response_format and structured_outputs cannot be combined", "structured_outputs"
            )
        return self

    @model_validator(mode="after")
    def _check_min_tokens(self) -> "GenerationBody":
        if self.min_tokens and self.grammar:
            raise BadRequest("min_tokens cannot be combined with a grammar", "min_tokens")
        if self.min_tokens and self.min_tokens > (self.requested_max_tokens or self.min_tokens):
            raise BadRequest("min_tokens is above the most tokens asked for", "min_tokens")
        return self

    # Subclasses have it as a field, which pydantic forbids where a parent has a property
    if TYPE_CHECKING:

        @property
        def prompt(self) -> str | TokenIds | None:
            """The text or the token ids to continue; None for a chat."""

    @property
    def template_messages(self) -> list[dict[str, Any]] | None:
        """The chat messages to answer, as dicts that chat templates take; None for a prompt."""
        return None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call, in the form that templates take; None if none."""
        return None

    @property
    def template_options(self) -> dict[str, Any]:
        """The variables that the client sets for the chat template; empty for a prompt."""
        return {}

    @property
    def requested_max_tokens(self) -> int | None:
        """The most output tokens that the client asked for; None if the body sets no limit."""
        return None

    @property
    def requested_logprobs(self) -> int | None:
        """The number of likeliest alternatives to return with each output token's log probability.

        0 means the chosen token's log probability alone; None means no log probabilities.
        """
        return None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the output must follow; None if any text is allowed."""
        requested = self.structured_outputs or self.response_format
        return requested.grammar if requested else None

    @property
    def grammar_field(self) -> str:
        """The name of the body's field that `grammar` came from, for an error about the grammar."""
        return "structured_outputs" if self.structured_outputs else "response_format"

    def to_sampling(self) -> Sampling:
        """Return the sampling parameters for the engine; those that the body lacks are None.

        A `temperature` below 0.00001, or a `top_p` of 0, becomes a temperature of 0, which means
        greedy. A missing `max_tokens` becomes 0. The caller replaces it, because its default
        depends on the endpoint, the model, the tenant and the length of the prompt.
        """
        temperature = self.temperature
        if (temperature is not None and temperature < GREEDY_BELOW) or self.top_p == 0:
            temperature = 0.0
        return Sampling(
            max_tokens=self.requested_max_tokens or 0,
            temperature=temperature,
            top_p=1.0 if self.top_p == 0 else self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            seed=self.seed,
            stop=self.stop,
            logprobs=self.requested_logprobs,
            ignore_eos=bool(self.ignore_eos),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,
            grammar=self.grammar,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=self.stop_token_ids,
            # some models mark calls of tools with them
            skip_special_tokens=self.skip_special_tokens is not False and not self.offered_tools,
        )
