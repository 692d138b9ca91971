"""The `response` object, and the ids and items that clients know. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from api.openai_bodies import JsonBody, Usage
from api.schemas.responses import FunctionCallItem, FunctionOutputItem, Item, ResponseRequest
from streams import messages
from streams.errors import BadRequest, NotFound, http_status
from streams.records.jobs.item_results import CANCELLED, ItemResult

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]
_RESPONSE = "resp_"
_ID = re.compile(r"[0-9a-f]{32}\Z")


def response_id(bare: str) -> str:
    """Return the id by which clients know a response."""
    return f"{_RESPONSE}{bare}"


def parse_response_id(told: str) -> str:
    """Return the id of a response's record; raises `NotFound` for what is no response's id."""
    bare = told.removeprefix(_RESPONSE)
    if bare == told or not _ID.match(bare):
        raise response_not_found(told)
    return bare


def response_not_found(told: str) -> NotFound:
    """Return the error for an id that names no stored response of the tenant's."""
    return NotFound(
        f"there is no response {told!r}: it was deleted, has expired, or was not stored"
    )


@dataclass(frozen=True)
class ResponseHead:
    """Facts of a response that never change. `created_at` is in epoch seconds."""

    id: str  # without its prefix
    created_at: int
    body: ResponseRequest

    @property
    def told_id(self) -> str:
        """The id by which clients know the response."""
        return response_id(self.id)


@dataclass(frozen=True)
class ResponseEnd:
    """End of a response. `usage` is None unless it was completed, or cut at a limit."""

    status: Status
    usage: Usage | None = None
    error: JsonBody | None = None

    @classmethod
    def from_finish(cls, reason: str, usage: Usage) -> "ResponseEnd":
        """Return the end of an answer with a finish reason: `length` is incomplete."""
        return cls("incomplete" if reason == "length" else "completed", usage)

    @classmethod
    def from_failure(cls, code: str, message: str) -> "ResponseEnd":
        """Return the end by a failure, or by a cancellation."""
        if code == CANCELLED:
            return cls(CANCELLED)
        kind = "invalid_prompt" if http_status(code) < 500 else "server_error"
        return cls("failed", error={"code": kind, "message": f"{code}: {message}"})

    @classmethod
    def from_result(cls, result: ItemResult) -> "ResponseEnd":
        """Return the end that a stored result stands for."""
        if result.code:
            return cls.from_failure(result.code, result.message)
        return cls.from_finish(result.finish or "stop", result.usage)


def response_object(
    head: ResponseHead, end: ResponseEnd, output: Sequence[JsonBody] = ()
) -> JsonBody:
    """Return the `response` object; one that has not ended has an end without usage and error."""
    body, cut = head.body, end.status == "incomplete"
    return {
        "id": head.told_id,
        "object": "response",
        "created_at": head.created_at,
        "status": end.status,
        "background": bool(body.background),
        "error": end.error,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": body.model,
        "output": list(output),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning else None,
            "summary": None,
        },
        "service_tier": body.service_tier or "default",
        "store": body.is_stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": _text_format(body), "verbosity": "medium"},
        "tool_choice": body.tool_choice,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": end.usage and _usage(end.usage),
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _text_format(body: ResponseRequest) -> JsonBody:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return {"type": "text"}
    return wanted.model_dump(by_alias=True, exclude_none=True)


def _usage(usage: Usage) -> JsonBody:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": messages.cached_tokens(usage),
            "cache_write_tokens": 0,  # the prefix cache costs nothing to write
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def input_item_objects(head: ResponseHead) -> list[JsonBody]:
    """Return the items of a response's input, each with an id, as `input_items` lists them."""
    return [
        {"id": f"item_{head.id}_{number}", "status": "completed", **_item_object(item)}
        for number, item in enumerate(head.body.input)
    ]


def _item_object(item: Item) -> JsonBody:
    if isinstance(item, FunctionCallItem | FunctionOutputItem):
        return item.model_dump(include={"type", "call_id", "name", "arguments", "output"})
    parts = item.content
    texts = [parts] if isinstance(parts, str) else [part["text"] for part in parts]
    content = [output_text(t) if item.role == "assistant" else _input_text(t) for t in texts]
    return {"type": "message", "role": item.role, "content": content}


def _input_text(text: str) -> JsonBody:
    return {"type": "input_text", "text": text}


def output_text(text: str, logprobs: Sequence[Any] = ()) -> JsonBody:
    """Return the part of a message of the assistant that holds a text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def check_cancellable(head: ResponseHead) -> None:
    """Raise `BadRequest` unless the response runs in the background."""
    if not head.body.background:
        raise BadRequest(
            "only a response that was created with background: true can be cancelled", "response_id"
        )
