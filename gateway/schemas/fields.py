"""What several requests share: strict types, limits, OpenAI's fields that are not supported yet."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from streams.messages import Grammar, Sampling
from streams.subjects import Priority

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_NAME = 256
MAX_N = 8
MAX_CHOICES = 128  # of all prompts of one body together
_INT32 = 2**31
_INT64 = 2**63
_SHOWN = 40

WRONG, UNSUPPORTED = "wrong_value", "unsupported_value"  # of errors whose words are our own

Count = Annotated[int, Field(ge=1, lt=_INT32)]
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Seed = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
Tokens = list[int]
PriorityName = Literal["interactive", "standard", "batch"]


def shown(value: object) -> str:
    """A value as an error message quotes it: short, and of containers only what they are."""
    if isinstance(value, dict | list | bytes):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def wrong(reason: str) -> PydanticCustomError:
    """A value that a validator does not take; pydantic adds the path of its field."""
    return PydanticCustomError(WRONG, "{reason}", {"reason": reason})


def unsupported(reason: str) -> PydanticCustomError:
    """A value that is right in itself and not supported here."""
    return PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": reason})


class Only:
    """Annotates a field of OpenAI's that takes `values` alone: those that ask for nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self.values)}

    def _check(self, value: object) -> object:
        if any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values):
            return value
        raise unsupported(f"{shown(value)} is not supported, only {self.values[-1]!r} is")


# Accepted and ignored: they ask for nothing that a client could miss.
Ignored = Annotated[Any, WithJsonSchema({"description": "accepted and ignored"})]
Nothing = Annotated[Any, Only(None)]
NothingListed = Annotated[Any, Only(None, [])]
NothingMapped = Annotated[Any, Only(None, {})]
Zero = Annotated[Any, Only(None, 0)]
No = Annotated[Any, Only(None, False)]


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise wrong(f"has {len(stops)} strings, the limit is {MAX_STOPS}")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise wrong(f"must be of 1 to {MAX_STOP_CHARACTERS} characters each")
    return stops


Stops = Annotated[
    list[str],
    PlainValidator(_stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS},
                {"type": "null"},
            ]
        }
    ),
]


def is_tokens(value: object) -> TypeGuard[Tokens]:
    """Whether this is a list of token ids (not of booleans), in whatever vocabulary."""
    return isinstance(value, list) and set(map(type, value)) == {int}


def _prompt(value: object) -> str | Tokens:
    """One prompt: a text, token ids, or a list of exactly one of them."""
    prompts = _prompts(value)
    if len(prompts) > 1:
        raise unsupported(f"has {len(prompts)} prompts, only one is supported here")
    return prompts[0]


def _prompts(value: object) -> list[str | Tokens]:
    """One prompt or many, each a text or token ids; always a list of them in the end."""
    many = [value] if _is_one_prompt(value) else value
    if not isinstance(many, list) or not many or not all(map(_is_one_prompt, many)):
        raise wrong("must be a text, a list of token ids, or a list of either, and not empty")
    return many


def _is_one_prompt(value: object) -> TypeGuard[str | Tokens]:
    return value != "" if isinstance(value, str) else is_tokens(value)


_TEXT_OR_TOKENS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "integer"}},
]


def _prompt_schema(most: int) -> WithJsonSchema:
    many = {"type": "array", "items": {"anyOf": _TEXT_OR_TOKENS}, "minItems": 1, "maxItems": most}
    return WithJsonSchema({"anyOf": [*_TEXT_OR_TOKENS, many]})


Prompt = Annotated[str | Tokens, PlainValidator(_prompt), _prompt_schema(1)]
Prompts = Annotated[list[str | Tokens], PlainValidator(_prompts), _prompt_schema(MAX_CHOICES)]


class Body(BaseModel):
    """What a stranger sends: strict types, no unknown fields, never changed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class Work(Body):
    """What may be said of any work: for which model, and when it is wanted."""

    model: ModelName
    priority: PriorityName | None = None
    deadline_ms: Count | None = Field(
        default=None, description="ends in an error if not done so long after acceptance"
    )

    @property
    def lane(self) -> Priority:
        """Which of the tenant's lanes this belongs in."""
        return Priority(self.priority or Priority.STANDARD)


class Generation(Work):
    """What may be said of any generation: how to choose tokens, and when to stop."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=_INT32, description="0: off")
    seed: Seed | None = None
    stop: Stops = []
    ignore_eos: bool | None = Field(
        default=None, description="generate max_tokens tokens whatever the model says"
    )

    if (
        TYPE_CHECKING
    ):  # some have it as a field, which pydantic forbids where a parent has a property

        @property
        def prompt(self) -> str | Tokens | None:
            """The text or the token ids to continue; None for a chat."""

    @property
    def chat(self) -> list[dict[str, Any]] | None:
        """The messages to answer; None for a prompt."""
        return None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """What the model may call, as chat templates want it."""
        return None

    @property
    def grammar(self) -> Grammar | None:
        """What the output must be."""
        return None

    @property
    def most_tokens(self) -> int | None:
        """What the client set as the limit of its output."""
        return None

    @property
    def wanted_logprobs(self) -> int | None:
        """None: off; n: with the n likeliest alternatives."""
        return None

    def sampling(self, default_max_tokens: int) -> Sampling:
        """How the engine is to choose, with OpenAI's defaults for what was not said."""
        return Sampling(
            max_tokens=self.most_tokens or default_max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=self.top_k or 0,
            seed=self.seed,
            stop=self.stop,
            logprobs=self.wanted_logprobs,
            ignore_eos=bool(self.ignore_eos),
            grammar=self.grammar,
            skip_special_tokens=not self.offered_tools,  # some mark calls with them
        )
