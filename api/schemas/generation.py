"""What may be said of any generation, in OpenAI's words and some of vLLM's."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from api.schemas.fields import INT32, InferenceBody, LogitBias, Seed, Stops, TokenIds
from api.schemas.structured_outputs import ResponseFormat, StructuredOutputs
from streams.errors import BadRequest
from streams.messages import Grammar, Sampling

Penalty = Annotated[float, Field(ge=-2, le=2)]


class GenerationBody(InferenceBody):
    """What may be said of any generation: how to choose tokens, and when to stop."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=INT32, description="0: off")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="drop what is less likely than this times the best"
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
        default=None, description="generate max_tokens tokens whatever the model says"
    )

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _has_one_grammar(self) -> "GenerationBody":
        if self.structured_outputs and self.response_format and self.response_format.grammar:
            raise BadRequest(
                "response_format and structured_outputs cannot be combined", "structured_outputs"
            )
        return self

    if (
        TYPE_CHECKING
    ):  # some have it as a field, which pydantic forbids where a parent has a property

        @property
        def prompt(self) -> str | TokenIds | None:
            """The text or the token ids to continue; None for a chat."""

    @property
    def template_messages(self) -> list[dict[str, Any]] | None:
        """The messages to answer; None for a prompt."""
        return None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """What the model may call, as chat templates want it."""
        return None

    @property
    def requested_max_tokens(self) -> int | None:
        """What the client set as the limit of its output."""
        return None

    @property
    def requested_logprobs(self) -> int | None:
        """None: off; n: with the n likeliest alternatives."""
        return None

    @property
    def grammar(self) -> Grammar | None:
        """What the output must look like; None for any text."""
        wanted = self.structured_outputs or self.response_format
        return wanted.grammar if wanted else None

    @property
    def grammar_field(self) -> str:
        """Where the grammar came from, to be named if it is no good."""
        return "structured_outputs" if self.structured_outputs else "response_format"

    def to_sampling(self) -> Sampling:
        """How the engine is to choose, with OpenAI's defaults for what was not said.

        `max_tokens` is 0 then: its default depends on more than the request.
        """
        return Sampling(
            max_tokens=self.requested_max_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=self.top_k or 0,
            seed=self.seed,
            stop=self.stop,
            logprobs=self.requested_logprobs,
            ignore_eos=bool(self.ignore_eos),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,
            grammar=self.grammar,
            skip_special_tokens=not self.offered_tools,  # some mark calls with them
        )
