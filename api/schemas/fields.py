"""Types, limits and validators that several schemas share, and OpenAI's unsupported fields."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
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
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_NAME = 256
MAX_N = 8
MAX_CHOICES = 128  # answers to all prompts of one body together
MAX_BIASES = 1024
MAX_FIELDS = 64  # of one object; no schema here has so many
MAX_VALUES = 32_768  # in an object whose fields are the client's own
MAX_DEPTH = 100  # of an object whose fields are the client's own
MAX_BIAS = 100
INT32 = 2**31
_INT64 = 2**63
_MAX_QUOTED_CHARACTERS = 40
_PIECE_ITEMS = 32_768  # checked in one call into C, which no other thread can interrupt
_JSON_TYPES = frozenset({dict, list, str, int, float, bool, type(None)})
_USER_FIELDS = ("safety_identifier", "user")  # the newer of the two first
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}", re.ASCII)

WRONG, UNSUPPORTED = "wrong_value", "unsupported_value"  # types of errors with a text of our own

Count = Annotated[int, Field(ge=1, lt=INT32)]
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Seed = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
TokenIds = list[int]
PriorityName = Literal["interactive", "standard", "batch"]


def describe_value(value: object) -> str:
    """Return a value as error messages quote it, in at most 40 characters.

    A list, an object or bytes are shown as their type and length, anything else as its shortened
    `repr`.
    """
    if isinstance(value, dict | list | bytes):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    if len(text) <= _MAX_QUOTED_CHARACTERS:
        return text
    return text[: _MAX_QUOTED_CHARACTERS - 1] + "…"


def wrong_value(reason: str) -> PydanticCustomError:
    """Return the error that a pydantic validator must raise for a wrong value.

    `reason` is the rest of a sentence that begins with the field's path; the path is added later
    (`parsing.to_bad_request`), and the client gets a `BadRequest`.
    """
    return PydanticCustomError(WRONG, "{reason}", {"reason": reason})


def unsupported_value(reason: str) -> PydanticCustomError:
    """Return the error that a pydantic validator must raise for a value that is not supported.

    `reason` is the rest of a sentence that begins with the field's path. The client gets an
    `UnsupportedValue`, since OpenAI's API accepts the value.
    """
    return PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": reason})


class OnlyValues:
    """Annotation of a field of OpenAI's that is not supported.

    The field accepts only the given `values`, which ask for nothing; any other value is refused
    with `unsupported_value`.
    """

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


# Accepted and ignored: clients miss nothing if these have no effect
Ignored = Annotated[Any, WithJsonSchema({"description": "accepted and ignored"})]
OnlyNull = Annotated[Any, OnlyValues(None)]
OnlyNullOrEmpty = Annotated[Any, OnlyValues(None, [])]
OnlyFalse = Annotated[Any, OnlyValues(None, False)]
OnlyTrue = Annotated[Any, OnlyValues(None, True)]
OnlyOne = Annotated[Any, OnlyValues(None, 1)]
OnlyEmptyObject = Annotated[Any, OnlyValues(None, {})]


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
    """Return (token id, bias) pairs in order of the ids, so that equal biases compare equal.

    JSON can spell the ids only as texts.
    """
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


StopTokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=INT32)]],
    BeforeValidator(lambda value: [] if value is None else value),
    Field(max_length=MAX_STOP_TOKEN_IDS),
]
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
    """Return True if `value` is a non-empty list of integers; booleans do not count as integers.

    The ids are not compared with any vocabulary; `api.tokenizer.check_token_ids` does that.
    """
    if not isinstance(value, list):
        return False
    if len(value) <= _PIECE_ITEMS:
        return set(map(type, value)) == {int}
    pieces = (value[at : at + _PIECE_ITEMS] for at in range(0, len(value), _PIECE_ITEMS))
    return all(set(map(type, piece)) == {int} for piece in pieces)


def _parse_prompt(value: object) -> str | TokenIds:
    """Return the one prompt, which may come as text, as token ids, or as a list of exactly one."""
    prompts = _parse_prompts(value)
    if len(prompts) > 1:
        raise unsupported_value(f"has {len(prompts)} prompts, only one is supported here")
    return prompts[0]


def _parse_prompts(value: object) -> list[str | TokenIds]:
    """Return the prompts as a list; one or many may come, each as text or as token ids."""
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
    """Return `value` unchanged if it is JSON of at most `MAX_VALUES` values, nested to `MAX_DEPTH`.

    Raises the error of `wrong_value` otherwise. This is checked because msgpack has types that JSON
    lacks, and because some JSON parsers recurse and would fail on deep nesting.
    """
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
    """The objects and lists among `values`; raises for a value that is not JSON."""
    kinds = set(map(type, values))
    if not kinds <= _JSON_TYPES:
        culprit = next(each for each in values if type(each) not in _JSON_TYPES)
        raise wrong_value(f"must be JSON, and holds {describe_value(culprit)}")
    if kinds.isdisjoint((dict, list)):
        return []
    return [each for each in values if isinstance(each, dict | list)]


JsonObject = Annotated[dict[str, Any], AfterValidator(check_plain_json)]


class Body(BaseModel):
    """Base of all schemas: values must have the exact type, unknown fields are refused.

    Instances are immutable. A body with more than `MAX_FIELDS` fields is refused as a whole.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        protected_namespaces=(),
        hide_input_in_errors=True,  # prompts are no matter for a log
    )

    @model_validator(mode="before")
    @classmethod
    def _check_field_count(cls, value: Any) -> Any:
        """Refuse objects with many fields, since pydantic makes an error of each unknown one."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise wrong_value(f"has {len(value)} fields, the limit is {MAX_FIELDS}")
        return value


class InferenceBody(Body):
    """Base of all requests to a model: its name, the priority and the deadline."""

    model: ModelName
    priority: PriorityName | None = None
    deadline_ms: Count | None = Field(
        default=None, description="the request fails if it is not done so long after acceptance"
    )

    @property
    def lane_priority(self) -> Priority:
        """The priority with which the request is queued; standard if the body names none."""
        return Priority(self.priority or Priority.STANDARD)

    @property
    def end_user(self) -> str:
        """The client's own name of its user, as OpenAI's API takes it; empty if it gave none."""
        given = (getattr(self, name, None) for name in _USER_FIELDS)
        return next((name for name in given if isinstance(name, str)), "")
