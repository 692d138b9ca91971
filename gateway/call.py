"""One request on a WebSocket: from the records of its log to frames with the client's own id."""

from collections.abc import Callable, Iterator
from typing import Any

from gateway.answers import classification, floats
from gateway.following import Following, Record
from gateway.metrics import Watch
from gateway.outbound import Frame
from gateway.result_frame import ResultFrame

Send = Callable[[dict[str, Any] | Frame], bool]


class Call:
    """Turns records into frames. `send` queues one, encoded or not, and tells if more may come.

    Nothing is sent before `accept`: replies may overtake the broker's confirmation. `after` is the
    index of the last token that the client has (-1: none).
    """

    def __init__(self, id: str, send: Send, result: ResultFrame, after: int = -1) -> None:
        self.id = id
        self.following: Following | None = None
        self.cancel_wanted = False
        self.ended = False
        self._send, self._after = send, after
        self._watch: Watch | None = None
        self._early: list[Record] | None = []
        self._result = result
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
            self._result.add(_items(record))
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

    def _done(self, record: Record) -> dict[str, Any] | Frame:
        """A `result` if there is one and it is whole: what was cancelled may have stored a part."""
        timing = {"admit": round(self._admit_ms, 3), **record["timing"]}
        if not self._result or record["finish_reason"] == "cancelled":
            return self._frame(record, "finish_reason", "usage") | {"timing": timing}
        head = {"type": "result", "id": self.id, "usage": record["usage"], "timing": timing}
        return self._result.whole(head)

    def _frame(self, record: Record, *names: str) -> dict[str, Any]:
        return {"type": record["type"], "id": self.id, **{name: record[name] for name in names}}


def _items(record: Record) -> Iterator[dict[str, Any]]:
    """The items of `data` that one record's rows make: classifications, or else embeddings."""
    labels = record.get("labels")
    for index, row in enumerate(record["vectors"], start=record["index"]):
        if labels:
            yield classification(index, row, labels)
        else:
            yield {"index": index, "embedding": floats(row)}
