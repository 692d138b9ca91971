"""The body of /v1/embeddings."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from api.schemas.fields import Count, Ignored, InferenceBody, TokenIds, is_token_ids, wrong_value

MAX_INPUTS = 2048
Inputs = list[str] | list[TokenIds]


def _parse_inputs(value: object) -> Inputs:
    """One input or many, as texts or as token ids; always a list of them in the end."""
    if is_token_ids(value):
        return [value]
    many = [value] if isinstance(value, str) else value
    if not isinstance(many, list) or not many:
        raise wrong_value("must be a text, token ids, or a list of either")
    if len(many) > MAX_INPUTS:
        raise wrong_value(f"has {len(many)} inputs, the limit is {MAX_INPUTS}")
    if not all(isinstance(i, str) for i in many) and not all(map(is_token_ids, many)):
        raise wrong_value("must hold texts alone, or lists of token ids alone")
    if "" in many:
        raise wrong_value(f"has an empty text at {many.index('')}")
    return many


_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
InputField = Annotated[
    Inputs,
    PlainValidator(_parse_inputs),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_INPUTS},
                _TOKENS,
                {"type": "array", "items": _TOKENS, "maxItems": MAX_INPUTS},
            ]
        }
    ),
]


class EmbeddingBody(InferenceBody):
    """What may be said of any embedding."""

    input: InputField
    dimensions: Count | None = Field(default=None, description="how many, the first ones")


class EmbeddingRequest(EmbeddingBody):
    """Texts to embed."""

    encoding_format: Literal["float", "base64"] | None = None
    user: Ignored = None
