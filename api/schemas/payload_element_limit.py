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
    """Raise `BadRequest` if `data` has more than `MAX_PARTS` objects, lists and texts in all.

    Field names count as texts. The parts are counted without parsing, so invalid JSON may pass; the
    parser must still refuse it.
    """
    if has_more(data, (b"{", b"[", b'"'), MAX_PARTS):
        raise BadRequest(f"this holds more than {MAX_PARTS} objects, lists and texts")


def has_more(data: bytes, characters: tuple[bytes, ...], limit: int) -> bool:
    """Return True if `data`, a JSON text, has more than `limit` of the given structural characters.

    Characters inside of JSON strings are not counted, and each string counts as one `"`. More than
    `limit` strings also give True, even if `"` is not among `characters`. `data` is not parsed and
    may be invalid.
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
    """Return the value that `data` encodes in msgpack.

    Raises `BadRequest` as soon as there are more than `MAX_PARTS` maps and lists. Raises
    `ValueError` for extension types, and `ValueError` or another of msgpack's own errors for bytes
    that are not msgpack.
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
