"""Bodies of /v1/classify and /v1/rerank."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from api.schemas.embeddings import MAX_INPUTS, InputField
from api.schemas.fields import Ignored, InferenceBody, describe_value, wrong_value


class ClassificationBody(InferenceBody):
    """Base of all requests to classify, whether over HTTP, WebSocket or NATS."""

    input: InputField


class ClassifyRequest(ClassificationBody):
    """Body of /v1/classify: texts to classify."""

    user: Ignored = None


def _parse_documents(value: object) -> list[str]:
    """Return the documents as texts; each may come as a text or as `{"text": ...}`."""
    if not isinstance(value, list) or not value:
        raise wrong_value("must be a list of texts, or of objects with a text, and not empty")
    if len(value) > MAX_INPUTS:
        raise wrong_value(f"has {len(value)} documents, the limit is {MAX_INPUTS}")
    return [_text(index, document) for index, document in enumerate(value)]


def _text(index: int, document: object) -> str:
    text = document["text"] if isinstance(document, dict) and {*document} == {"text"} else document
    if not isinstance(text, str):
        raise wrong_value(
            f'has at {index} no text and no {{"text": …}} alone, but {describe_value(document)}'
        )
    if not text:
        raise wrong_value(f"has an empty text at {index}")
    return text


_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_DOCUMENT: dict[str, Any] = {
    "type": "object",
    "properties": {"text": _TEXT},
    "required": ["text"],
    "additionalProperties": False,
}
Documents = Annotated[
    list[str],
    PlainValidator(_parse_documents),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"anyOf": [_TEXT, _DOCUMENT]},
            "minItems": 1,
            "maxItems": MAX_INPUTS,
        }
    ),
]


class RerankRequest(InferenceBody):
    """Body of /v1/rerank: documents to be ordered by their relevance to a query."""

    query: str = Field(min_length=1)
    documents: Documents
    top_n: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="return only this many of the best documents; 0 or null: all",
    )
    return_documents: bool | None = Field(
        default=None, description="false: return indices and scores without texts"
    )
    user: Ignored = None
