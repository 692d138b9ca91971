"""Body of /v1/embeddings, and the `input` field that classifications share with it."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from api.schemas.fields import Count, Ignored, InferenceBody, TokenIds, is_token_ids, wrong_value

MAX_INPUTS = 2048
Inputs = list[str] | list[TokenIds]


def _parse_inputs(value: object) -> Inputs:
    """Return the inputs as a list; one or many may come, as texts or as token ids."""
    if is_token_ids(value):
        return [value]
    inputs = [value] if isinstance(value, str) else value
    if not isinstance(inputs, list) or not inputs:
        raise wrong_value("must be a text, token ids, or a list of either")
    if len(inputs) > MAX_INPUTS:
        raise wrong_value(f"has {len(inputs)} inputs, the limit is {MAX_INPUTS}")
    if not all(isinstance(i, str) for i in inputs) and not all(map(is_token_ids, inputs)):
        raise wrong_value("must hold texts alone, or lists of token ids alone")
    if "" in inputs:
        raise wrong_value(f"has an empty text at {inputs.index('')}")
    return inputs


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
    """Base of all requests for embeddings, whether over HTTP, WebSocket or NATS."""

    input: InputField
    dimensions: Count | None = Field(
        default=None, description="return only this many of the first dimensions"
    )


class EmbeddingRequest(EmbeddingBody):
    """Body of /v1/embeddings: texts or token ids to embed."""

    encoding_format: Literal["float", "base64"] | None = None
    user: Ignored = None
