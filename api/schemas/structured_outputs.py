"""Fields that set an output's form: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, Field, model_validator

from api.schemas.fields import Body, JsonObject, wrong_value
from streams.errors import BadRequest
from streams.grammars.llguidance_grammar import MAX_CHARACTERS
from streams.messages import Grammar

MAX_CHOICE_TEXTS = 1024
Schema = JsonObject


def _check_characters(choices: list[str]) -> list[str]:
    if sum(map(len, choices)) > MAX_CHARACTERS:
        raise wrong_value(f"has more than {MAX_CHARACTERS} characters")
    return choices


ChoiceTexts = Annotated[
    list[str], Field(min_length=1, max_length=MAX_CHOICE_TEXTS), AfterValidator(_check_characters)
]


class JsonSchema(Body):
    """A named JSON schema. The output always follows it exactly, whether `strict` or not."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    json_schema: Schema = Field(alias="schema")
    description: str | None = Field(default=None, description="accepted and ignored")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`: any text, any JSON object, or JSON that follows a schema.

    A bare `schema` beside the type `json_object` is the form of Together, Anyscale and instructor;
    it has the effect of a `json_schema`.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    bare_schema: Schema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _check_json_schema(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            field = "response_format.json_schema"
            needs = "is needed for" if self.json_schema is None else "is only for"
            raise BadRequest(f"{field} {needs} type: 'json_schema'", field)
        if self.bare_schema is not None and self.type != "json_object":
            field = "response_format.schema"
            raise BadRequest(f"{field} is only for type: 'json_object'", field)
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the output must follow; None if any text is allowed."""
        if self.json_schema:
            return _schema_grammar(self.json_schema.json_schema)
        if self.bare_schema is not None:
            return _schema_grammar(self.bare_schema)
        return Grammar("json_object") if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of a JSON schema, a regular expression, choices.

    The whole output matches the regular expression, or is exactly one of the choices.
    """

    json_schema: Schema | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: ChoiceTexts | None = None

    @model_validator(mode="after")
    def _check_exactly_one(self) -> "StructuredOutputs":
        if sum(each is not None for each in (self.json_schema, self.regex, self.choice)) != 1:
            field = "structured_outputs"
            raise BadRequest(f"{field} must have one of json, regex and choice", field)
        return self

    @property
    def grammar(self) -> Grammar:
        """The grammar that the output must follow."""
        if self.choice is not None:
            return Grammar("regex", "|".join(map(_literal_regex, self.choice)))
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if isinstance(self.json_schema, str):
            return Grammar("json_schema", self.json_schema)
        return _schema_grammar(self.json_schema)


def _schema_grammar(schema: dict[str, Any] | None) -> Grammar:
    return Grammar("json_schema", orjson.dumps(schema).decode())


def _literal_regex(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
