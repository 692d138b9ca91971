"""Translates a response's items and options into the body of a chat. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from api.schemas.completions import ChatRequest
from api.schemas.parsing import parse
from api.schemas.responses import (
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    Item,
    MessageItem,
    ResponseRequest,
    TextFormat,
)
from streams.errors import BadRequest

# What errors of the chat's fields are about, in the client's own words
_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}


def to_chat(body: ResponseRequest, earlier: Sequence[Item] = ()) -> ChatRequest:
    """Return the chat that a response answers: instructions, `earlier` items, and its input.

    Raises `BadRequest` for what a chat does not take, about the response's own field.
    """
    wire = {
        "model": body.model,
        "messages": _to_messages(body.instructions, [*earlier, *body.input]),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": True if body.tells_logprobs else None,
        "top_logprobs": body.top_logprobs or None,
        "tools": [_to_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _to_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _to_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "service_tier": body.service_tier,
        "priority": body.priority,
        "deadline_ms": body.deadline_ms,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
    }
    try:
        return parse(ChatRequest, {name: each for name, each in wire.items() if each is not None})
    except BadRequest as error:
        error.field = _own_field(error.field)
        raise


def _own_field(field: str | None) -> str | None:
    if field is None:
        return None
    first = field.partition(".")[0].partition("[")[0]
    return _FIELDS.get(first, first)


def _to_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return chat messages; calls join the message of the assistant before them."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": item.content})
        elif isinstance(item, FunctionOutputItem):
            told = {"tool_call_id": item.call_id, "content": item.output}
            messages.append({"role": "tool", **told})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_to_call(item))
    return messages


def _to_call(item: FunctionCallItem) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _to_tool(tool: FunctionTool) -> dict[str, Any]:
    named = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": named}


def _to_choice(body: ResponseRequest) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice["name"]}}
    return None if choice == "auto" else choice


def _to_format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": {"name": wanted.name, "schema": wanted.json_schema},
    }
