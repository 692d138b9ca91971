"""One request on a WebSocket: from the records of its log to frames with the client's own id."""

from collections.abc import Callable
from typing import Any

from gateway.answers import floats
from gateway.following import Following, Record
from gateway.metrics import Watch

Send = Callable[[dict[str, Any]], bool]


class Call:
    """Turns records into frames. `send` queues a frame and tells whether there is room for more.

    Nothing is sent before `accept`: replies may overtake the broker's confirmation. `after` is the
    index of the last token that the client has (-1: none).
    """

    def __init__(self, id: str, send: Send, after: int = -1) -> None:
        self.id = id
        self.following: Following | None = None
        self.cancel_wanted = False
        self.ended = False
        self._send, self._after = send, after
        self._watch: Watch | None = None
        self._early: list[Record] | None = []
        self._vectors: list[list[float]] = []
        self._admit_ms = 0.0

    def accept(self, following: Following, watch: Watch, admit_ms: float) -> None:
        """The request is durable: say so, and send what has come meanwhile."""
        self.following, self._watch, self._admit_ms = following, watch, admit_ms
        self._send({"type": "accepted", "id": self.id, "request_id": following.request_id})
        early, self._early = self._early, None
        for record in early or ():
            self._relay(record)

    def record(self, record: Record, size: int) -> bool:
        """The sink of the request's following."""
        if self._early is not None:
            self._early.append(record)
            return True
        return self._relay(record)

    def _relay(self, record: Record) -> bool:
        assert self._watch  # of an accepted request
        self._watch.record(record)
        kind = record["type"]
        if kind == "chunk":
            return self._chunk(record)
        if kind == "result":
            self._vectors += map(floats, record["vectors"])
        elif kind == "started":
            return self._send(self._frame(record, "model", "version", "attempt"))
        elif kind == "done":
            self.ended = True
            return self._send(self._done(record))
        elif kind == "error":
            self.ended = True
            return self._send(self._frame(record, "code", "message"))
        return True

    def _chunk(self, record: Record) -> bool:
        last = record["index"] + record["count"] - 1
        if last <= self._after:
            return True
        if "logprobs" in record:
            return self._send(self._frame(record, "index", "count", "text", "logprobs"))
        return self._send(
            {
                "type": "chunk",
                "id": self.id,
                "index": record["index"],
                "count": record["count"],
                "text": record["text"],
            }
        )

    def _done(self, record: Record) -> dict[str, Any]:
        timing = {"admit": round(self._admit_ms, 3), **record["timing"]}
        if not self._vectors:
            return self._frame(record, "finish_reason", "usage") | {"timing": timing}
        embeddings = [
            {"index": index, "embedding": vector} for index, vector in enumerate(self._vectors)
        ]
        return {
            "type": "result",
            "id": self.id,
            "data": embeddings,
            "usage": record["usage"],
            "timing": timing,
        }

    def _frame(self, record: Record, *names: str) -> dict[str, Any]:
        return {"type": record["type"], "id": self.id, **{name: record[name] for name in names}}
