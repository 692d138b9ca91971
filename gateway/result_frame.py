"""A WebSocket's `result` frame, encoded record by record: at once it would hold the event loop.

A thread would not help, since both encoders keep Python's lock. Pure.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgpack
import orjson


class ResultFrame:
    """Grows by items; `whole` puts the rest of the frame's fields before them."""

    def __init__(self, encoding: Literal["json", "msgpack"]) -> None:
        self._is_json = encoding == "json"
        self._parts: list[bytes] = []

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, items: Iterable[Mapping[str, Any]]) -> None:
        """The next items of `data`, in order."""
        encode = orjson.dumps if self._is_json else msgpack.packb
        self._parts += map(encode, items)

    def whole(self, head: Mapping[str, Any]) -> str | bytes:
        """The frame with `head`'s fields and `data`."""
        if self._is_json:
            data = b'"data":[' + b",".join(self._parts) + b"]}"
            return (orjson.dumps(head)[:-1] + b"," + data).decode()
        packer = msgpack.Packer(autoreset=False)
        packer.pack_map_header(len(head) + 1)
        for name, value in head.items():
            packer.pack(name)
            packer.pack(value)
        packer.pack("data")
        packer.pack_array_header(len(self._parts))
        start: bytes = packer.bytes()
        return start + b"".join(self._parts)
