"""Bounds the parts of a JSON or msgpack payload before it is parsed.

A parser holds Python's lock to its end: of 1 MB, 300,000 empty lists take up to 30 ms, with the
garbage collector's work on them. Counting takes 1 ms, and 4 where many texts have to be cut out.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from streams.errors import BadRequest

MAX_PARTS = 65_536  # objects, lists and texts, field names among them; numbers cost little
T = TypeVar("T")


def check_json(data: bytes) -> None:
    """Raise `BadRequest` for more than `MAX_PARTS` parts; invalid JSON may pass."""
    if has_more(data, (b"{", b"[", b'"'), MAX_PARTS):
        raise BadRequest(f"this holds more than {MAX_PARTS} objects, lists and texts")


def has_more(data: bytes, characters: tuple[bytes, ...], limit: int) -> bool:
    """Return True if more than `limit` of these `characters` stand outside of JSON texts.

    A text counts as one `"`; more than `limit` texts are too many, whatever `characters` are.
    """
    if len(data) <= limit or _count(data, characters) <= limit:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * limit:
        return True
    return _count(b'"'.join(plain.split(b'"')[::2]), characters) > limit


def _count(data: bytes, characters: tuple[bytes, ...]) -> int:
    return sum(map(data.count, characters))


def unpack(data: bytes) -> Any:
    """Unpack msgpack; raises `BadRequest` once there are more than `MAX_PARTS` maps and lists.

    Raises `ValueError` for extension types, and as msgpack does for invalid data.
    """
    count = _part_counter(MAX_PARTS)
    return msgpack.unpackb(
        data, object_hook=count, list_hook=count, ext_hook=_refuse_extension, max_map_len=MAX_PARTS
    )


def _part_counter(limit: int) -> Callable[[T], T]:
    remaining = limit

    def count(part: T) -> T:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise BadRequest(f"this holds more than {limit} maps and lists")
        return part

    return count


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"it holds an extension of type {code}")
