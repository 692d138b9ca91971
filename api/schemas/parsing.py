"""Turns the bytes of a body or frame into a schema's record, or into one sentence about a fault."""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgpack
import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from api.schemas import payload_element_limit
from api.schemas.fields import UNSUPPORTED, WRONG, Body, describe_value
from api.schemas.websocket_frames import FRAMES, MAX_ID, SUBMISSIONS, Frame, SubmissionBody
from streams.errors import BadRequest, UnknownField, UnsupportedValue

B = TypeVar("B", bound=Body)
_PYDANTIC_SUBJECT = re.compile("^(Input|String|List) should")
_MESSAGES = {"model_type": "must be an object", "too_short": "must not be empty"}
Encoding = Literal["json", "msgpack"]


def decode(data: bytes | str, encoding: Encoding = "json") -> dict[str, Any]:
    """Return the object (a map) that `data` encodes in JSON or msgpack.

    Raises `BadRequest` if `data` cannot be decoded, holds something other than an object, or has
    too many parts (`payload_element_limit.MAX_PARTS`).
    """
    try:
        payload = _load(data, encoding)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise BadRequest(f"this is not {encoding}: {error}") from None
    if not isinstance(payload, dict):
        raise BadRequest(f"this must be an object, not {describe_value(payload)}")
    return payload


def _load(data: bytes | str, encoding: Encoding) -> Any:
    if len(data) <= payload_element_limit.MAX_PARTS:
        return orjson.loads(data) if encoding == "json" else msgpack.unpackb(data)
    data = data.encode() if isinstance(data, str) else data
    if encoding == "msgpack":
        return payload_element_limit.unpack(data)
    payload_element_limit.check_json(data)
    return orjson.loads(data)


def parse(record: type[B], wire: Mapping[str, Any]) -> B:
    """Return `wire`, a decoded object, as an instance of the schema class `record`.

    Raises `BadRequest`, or a subclass of it, with the path and the value of the first wrong field.
    """
    try:
        return record.model_validate(wire)
    except ValidationError as error:
        raise to_bad_request(error.errors(include_url=False)[0]) from None


def parse_frame(wire: Mapping[str, Any]) -> Frame:
    """Return the frame that a WebSocket client sent as the schema class that its `type` names.

    Raises `BadRequest` for an unknown type or a wrong field. `find_frame_id` then tells which of
    the client's requests the error is about.
    """
    kind = wire.get("type")
    return parse(_schema_of_type(kind, FRAMES), wire)


def find_frame_id(wire: Mapping[str, Any]) -> str | None:
    """Return the `id` that a WebSocket client gave a frame, even if the frame is otherwise invalid.

    None if the id is missing, or is not a text of 1 to 128 characters.
    """
    frame_id = wire.get("id")
    return frame_id if isinstance(frame_id, str) and 1 <= len(frame_id) <= MAX_ID else None


def parse_submission(wire: Mapping[str, Any], model: str, priority: str) -> SubmissionBody:
    """Return the request that a NATS producer published, with its subject's model and priority.

    `wire` is the decoded body. If it has no `type` it is an embedding if it has an `input`, else a
    generation. Raises `BadRequest` for an unknown type, for a wrong field, and for a body that
    names another model or priority than its subject.
    """
    whole = {**wire, "model": model, "priority": priority}
    for name in wire.keys() & {"model", "priority"}:
        if wire[name] != whole[name]:
            raise BadRequest(f"{name} differs from the subject's", name)
    kind = whole.pop("type", "embed" if "input" in wire else "generate")
    return parse(_schema_of_type(kind, SUBMISSIONS), whole)


def _schema_of_type(kind: object, known: Mapping[str, type[B]]) -> type[B]:
    if not isinstance(kind, str) or kind not in known:
        raise BadRequest(
            f"type is {describe_value(kind)}, must be one of {', '.join(known)}", "type"
        )
    return known[kind]


def to_bad_request(error: ErrorDetails) -> BadRequest:
    """Return the error for a client from one of pydantic's errors.

    Its message is one sentence with the field's path and value. The result is an `UnknownField` for
    a field that the schema does not have, an `UnsupportedValue` for a valid value of OpenAI's that
    is not supported, and else a plain `BadRequest`.
    """
    path = _path(error["loc"])
    if error["type"] == "extra_forbidden":
        return UnknownField(f"unknown field {path}", path)
    if error["type"] == "missing":
        return BadRequest(f"{path} is missing", path)
    if error["type"] == UNSUPPORTED:
        return UnsupportedValue(f"{path} {error['msg']}", path)
    if error["type"] == WRONG:
        return BadRequest(f"{path or 'this'} {error['msg']}", path or None)
    if error["type"] == "value_error" and not path:  # of a check of several fields
        return BadRequest(error["msg"].removeprefix("Value error, "))
    message = _MESSAGES.get(error["type"]) or _PYDANTIC_SUBJECT.sub("must", error["msg"])
    return BadRequest(
        f"{path or 'this'} {message}, it is {describe_value(error['input'])}", path or None
    )


def _path(location: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")
