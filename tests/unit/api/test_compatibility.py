"""Every row of docs/compatibility.md is true, and every field of the clients' has a row."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from api.schemas.completions import ChatRequest, CompletionRequest
from api.schemas.embeddings import EmbeddingRequest
from api.schemas.fields import Body
from api.schemas.parsing import parse
from streams.errors import BadRequest

DOCUMENT = Path(__file__).parents[3] / "docs" / "compatibility.md"
ROW = re.compile(r"^\| `(\{.*\})` \| (honoured|no effect|refused) \|", re.MULTILINE)
HI = {"role": "user", "content": "hi"}
CHAT: tuple[type[Body], dict[str, Any]] = (ChatRequest, {"model": "m", "messages": [HI]})
SECTIONS: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "Chats": CHAT,
    "Messages": CHAT,
    "Completions": (CompletionRequest, {"model": "m", "prompt": "hi"}),
    "Embeddings": (EmbeddingRequest, {"model": "m", "input": "hi"}),
    "vLLM's parameters": CHAT,
}
BARE = {"Messages": ("role", "content", "tool_calls", "tool_call_id")}


def rows() -> list[tuple[str, dict[str, Any], str]]:
    _, *sections = re.split("^## ", DOCUMENT.read_text(), flags=re.MULTILINE)
    return [
        (section.partition("\n")[0], json.loads(example), outcome)
        for section in sections
        for example, outcome in ROW.findall(section)
    ]


ROWS = rows()


def parsed(section: str, fields: dict[str, Any]) -> Any:
    record, body = SECTIONS[section]
    if section == "Messages":
        return parse(record, {**body, "messages": [fields]})
    return parse(record, {**body, **fields})


def effect(body: Any) -> object:
    """All that an engine is asked for."""
    if isinstance(body, EmbeddingRequest):
        return body.input, body.dimensions, body.encoding_format
    chat = isinstance(body, ChatRequest)
    more = (body.template_messages, body.offered_tools, body.forces_tools) if chat else ()
    more = (*more, body.template_options)
    return body.to_sampling(), body.prompts, body.choice_count, body.lane_priority, more


@pytest.mark.parametrize(("section", "fields", "outcome"), ROWS)
def test_a_row_is_true(section: str, fields: dict[str, Any], outcome: str) -> None:
    if outcome == "refused":
        with pytest.raises(BadRequest) as refusal:
            parsed(section, fields)
        named = re.split(r"[.\[\]]+", refusal.value.field or "")
        assert section == "Messages" or named[0] in fields
        return
    body = parsed(section, fields)
    if outcome == "no effect":
        kept = {name: fields[name] for name in BARE.get(section, ()) if name in fields}
        assert effect(body) == effect(parsed(section, kept))


@pytest.mark.parametrize(
    ("section", "params"),
    [
        ("Chats", chat_create_params.CompletionCreateParamsBase),
        ("Completions", completion_create_params.CompletionCreateParamsBase),
        ("Embeddings", embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_every_field_of_the_sdk_has_a_row(section: str, params: Any) -> None:
    described = {name for title, fields, _ in ROWS if title == section for name in fields}
    assert set(params.__annotations__) <= described


@pytest.mark.parametrize("record", [ChatRequest, CompletionRequest, EmbeddingRequest])
def test_every_field_that_is_taken_has_a_row(record: type[Body]) -> None:
    described = {name for _, fields, _ in ROWS for name in fields} - {"no_such_field"}
    taken = {field.alias or name for name, field in record.model_fields.items()}
    assert taken <= described
