"""What several requests share: strict types, limits, OpenAI's fields that are not supported yet."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from streams.subjects import Priority

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_NAME = 256
MAX_N = 8
MAX_CHOICES = 128  # of all prompts of one body together
MAX_BIASES = 1024
MAX_FIELDS = 64  # of one object; none of ours knows so many
MAX_VALUES = 32_768  # of an object whose fields are the client's own
MAX_DEPTH = 100  # of an object whose fields are the client's own
MAX_BIAS = 100
INT32 = 2**31
_INT64 = 2**63
_SHOWN = 40
_PIECE = 32_768  # looked at in one call into C, which no other thread can interrupt
_PLAIN = frozenset({dict, list, str, int, float, bool, type(None)})
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}", re.ASCII)

WRONG, UNSUPPORTED = "wrong_value", "unsupported_value"  # of errors whose words are our own

Count = Annotated[int, Field(ge=1, lt=INT32)]
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Seed = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
TokenIds = list[int]
PriorityName = Literal["interactive", "standard", "batch"]


def describe_value(value: object) -> str:
    """A value as an error message quotes it: short, and of containers only what they are."""
    if isinstance(value, dict | list | bytes):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def wrong_value(reason: str) -> PydanticCustomError:
    """A value that a validator does not take; pydantic adds the path of its field."""
    return PydanticCustomError(WRONG, "{reason}", {"reason": reason})


def unsupported_value(reason: str) -> PydanticCustomError:
    """A value that is right in itself and not supported here."""
    return PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": reason})


class OnlyValues:
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
        raise unsupported_value(
            f"{describe_value(value)} is not supported, only {self.values[-1]!r} is"
        )


# Accepted and ignored: they ask for nothing that a client could miss.
Ignored = Annotated[Any, WithJsonSchema({"description": "accepted and ignored"})]
OnlyNull = Annotated[Any, OnlyValues(None)]
OnlyNullOrEmpty = Annotated[Any, OnlyValues(None, [])]
OnlyFalse = Annotated[Any, OnlyValues(None, False)]


def _parse_stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong_value("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise wrong_value(f"has {len(stops)} strings, the limit is {MAX_STOPS}")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise wrong_value(f"must be of 1 to {MAX_STOP_CHARACTERS} characters each")
    return stops


Stops = Annotated[
    list[str],
    PlainValidator(_parse_stops),
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


def _parse_bias(value: object) -> list[tuple[int, float]]:
    """By token id, which JSON can only spell as text; sorted, so that equal wishes look alike."""
    if value is None:
        return []
    if not isinstance(value, dict):
        raise wrong_value(f"must be an object, not {describe_value(value)}")
    if len(value) > MAX_BIASES:
        raise wrong_value(f"has {len(value)} tokens, the limit is {MAX_BIASES}")
    for token, bias in value.items():
        if not (isinstance(token, str) and _TOKEN_ID.fullmatch(token)):
            raise wrong_value(f"must have token ids for names, not {describe_value(token)}")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise wrong_value(
                f"must have numbers from -{MAX_BIAS} to {MAX_BIAS}, not {describe_value(bias)}"
            )
    return sorted((int(token), float(bias)) for token, bias in value.items())


LogitBias = Annotated[
    list[tuple[int, float]],
    PlainValidator(_parse_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": MAX_BIASES,
                    "additionalProperties": {
                        "type": "number",
                        "minimum": -MAX_BIAS,
                        "maximum": MAX_BIAS,
                    },
                },
                {"type": "null"},
            ],
            "description": "by token id, added to logits",
        }
    ),
]


def is_token_ids(value: object) -> TypeGuard[TokenIds]:
    """Whether this is a list of token ids (not of booleans), in whatever vocabulary."""
    if not isinstance(value, list):
        return False
    if len(value) <= _PIECE:
        return set(map(type, value)) == {int}
    pieces = (value[at : at + _PIECE] for at in range(0, len(value), _PIECE))
    return all(set(map(type, piece)) == {int} for piece in pieces)


def _parse_prompt(value: object) -> str | TokenIds:
    """One prompt: a text, token ids, or a list of exactly one of them."""
    prompts = _parse_prompts(value)
    if len(prompts) > 1:
        raise unsupported_value(f"has {len(prompts)} prompts, only one is supported here")
    return prompts[0]


def _parse_prompts(value: object) -> list[str | TokenIds]:
    """One prompt or many, each a text or token ids; always a list of them in the end."""
    if _is_one_prompt(value):
        return [value]
    if isinstance(value, list) and len(value) > MAX_CHOICES:
        raise wrong_value(f"has {len(value)} prompts, the limit is {MAX_CHOICES}")
    if not isinstance(value, list) or not value or not all(map(_is_one_prompt, value)):
        raise wrong_value("must be a text, a list of token ids, or a list of either, and not empty")
    return value


def _is_one_prompt(value: object) -> TypeGuard[str | TokenIds]:
    return value != "" if isinstance(value, str) else is_token_ids(value)


_TEXT_OR_TOKENS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "integer"}},
]


def _prompt_schema(most: int) -> WithJsonSchema:
    many = {"type": "array", "items": {"anyOf": _TEXT_OR_TOKENS}, "minItems": 1, "maxItems": most}
    return WithJsonSchema({"anyOf": [*_TEXT_OR_TOKENS, many]})


Prompt = Annotated[str | TokenIds, PlainValidator(_parse_prompt), _prompt_schema(1)]
Prompts = Annotated[
    list[str | TokenIds], PlainValidator(_parse_prompts), _prompt_schema(MAX_CHOICES)
]


def check_plain_json(value: dict[str, Any]) -> dict[str, Any]:
    """`value` if any reader of JSON takes it: msgpack has more types, and some readers recurse."""
    level: list[Any] = [value]
    left = MAX_VALUES
    for _ in range(MAX_DEPTH):
        left -= sum(map(len, level))
        if left < 0:
            raise wrong_value(f"holds more than {MAX_VALUES} values")
        level = _containers([part for each in level for part in _parts(each)])
        if not level:
            return value
    raise wrong_value(f"is nested deeper than {MAX_DEPTH}")


def _parts(container: Any) -> Iterable[Any]:
    return container if isinstance(container, list) else container.values()


def _containers(values: list[Any]) -> list[Any]:
    """The objects and lists among them."""
    kinds = set(map(type, values))
    if not kinds <= _PLAIN:
        culprit = next(each for each in values if type(each) not in _PLAIN)
        raise wrong_value(f"must be JSON, and holds {describe_value(culprit)}")
    if kinds.isdisjoint((dict, list)):
        return []
    return [each for each in values if isinstance(each, dict | list)]


JsonObject = Annotated[dict[str, Any], AfterValidator(check_plain_json)]


class Body(BaseModel):
    """What a stranger sends: strict types, no unknown fields, never changed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _has_not_too_many_fields(cls, value: Any) -> Any:
        """Pydantic would make an error of each that it does not know."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise wrong_value(f"has {len(value)} fields, the limit is {MAX_FIELDS}")
        return value


class InferenceBody(Body):
    """What may be said of any work: for which model, and when it is wanted."""

    model: ModelName
    priority: PriorityName | None = None
    deadline_ms: Count | None = Field(
        default=None, description="ends in an error if not done so long after acceptance"
    )

    @property
    def lane_priority(self) -> Priority:
        """Which of the tenant's lanes this belongs in."""
        return Priority(self.priority or Priority.STANDARD)
