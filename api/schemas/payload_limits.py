"""How much JSON or msgpack holds, found out early: parsing keeps Python's lock to its end.

Of 1 MB, 300,000 empty lists take up to 30 ms to parse, with what the collector does about them;
counting takes 1 ms, and 4 where many texts have to be cut out.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from streams.errors import BadRequest

MAX_PARTS = 65_536  # objects, lists and texts, names among them: numbers cost little
T = TypeVar("T")


def check_json(data: bytes) -> None:
    """Raise `BadRequest` for more than `MOST_PARTS`; what is no JSON may pass."""
    if has_more(data, (b"{", b"[", b'"'), MAX_PARTS):
        raise BadRequest(f"this holds more than {MAX_PARTS} objects, lists and texts")


def has_more(data: bytes, marks: tuple[bytes, ...], most: int) -> bool:
    """Whether there are more than `most` of these characters outside of texts.

    A text counts as one `"`, and more than `most` texts as more of anything.
    """
    if len(data) <= most or _count(data, marks) <= most:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * most:
        return True
    return _count(b'"'.join(plain.split(b'"')[::2]), marks) > most


def _count(data: bytes, marks: tuple[bytes, ...]) -> int:
    return sum(map(data.count, marks))


def unpack(data: bytes) -> Any:
    """What `data` holds in msgpack; raises `BadRequest` once there are too many maps and lists."""
    count = _part_counter(MAX_PARTS)
    return msgpack.unpackb(
        data, object_hook=count, list_hook=count, ext_hook=_refuse_extension, max_map_len=MAX_PARTS
    )


def _part_counter(most: int) -> Callable[[T], T]:
    left = most

    def count(found: T) -> T:
        nonlocal left
        left -= 1
        if left < 0:
            raise BadRequest(f"this holds more than {most} maps and lists")
        return found

    return count


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"it holds an extension of type {code}")
