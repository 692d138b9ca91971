"""A WebSocket's `result` frame, encoded record by record so as not to block the event loop.

A thread would not help, since both encoders hold Python's lock. Pure.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgpack
import orjson


class ResultFrame:
    """A WebSocket's `result` frame in the making: items are encoded as they come.

    Thus the event loop is not blocked by encoding all of them at the end; `finish` only joins them,
    which is one copy (of 16 MB at most).
    """

    def __init__(self, encoding: Literal["json", "msgpack"]) -> None:
        self._is_json = encoding == "json"
        self._json_items: list[str] = []
        self._msgpack_items: list[bytes] = []

    def __len__(self) -> int:
        """Return the number of items so far."""
        return len(self._json_items) + len(self._msgpack_items)

    def add(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Encode further items of the frame's list `data`, in order."""
        if not self._is_json:
            self._msgpack_items += map(msgpack.packb, items)
            return
        for item in items:
            comma = b"," if self._json_items else b""
            self._json_items.append((comma + orjson.dumps(item)).decode())

    def finish(self, head: Mapping[str, Any]) -> str | bytes:
        """Return the encoded frame: the fields of `head`, and the list `data` with all items.

        The frame is text for JSON, bytes for msgpack.
        """
        if self._is_json:
            return "".join([orjson.dumps(head).decode()[:-1], ',"data":[', *self._json_items, "]}"])
        packer = msgpack.Packer(autoreset=False)
        packer.pack_map_header(len(head) + 1)
        for name, value in head.items():
            packer.pack(name)
            packer.pack(value)
        packer.pack("data")
        packer.pack_array_header(len(self._msgpack_items))
        return b"".join([packer.bytes(), *self._msgpack_items])
