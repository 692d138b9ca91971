"""The reply to one request on a WebSocket: the records of its log as frames with its own id."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import msgpack
import orjson

from api.openai_bodies import classification, unpack_floats
from gateway.metrics import RequestMetrics
from gateway.replies.log_subscription import LogSubscription
from gateway.replies.send_buffer import EncodedFrame
from streams.messages import Record
from streams.records.fleet.waking import Waking

EnqueueFrame = Callable[[dict[str, Any] | EncodedFrame], bool]


class ResultFrame:
    """A WebSocket's `result` frame in the making: vectors and labels are encoded as they come.

    Thus the event loop is not blocked by encoding all of them at the end: `finish` only joins them,
    which is one copy. A thread would not help, since both encoders hold Python's lock.
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


class WebSocketReply:
    """One request on a WebSocket: turns its records into frames that have the client's own `id`.

    `enqueue_frame` queues a frame, encoded or not, and returns False if the socket's send buffer is
    full. Records that come before `accept` are kept until then, because replies may overtake the
    broker's confirmation. Chunks up to token index `after`, which the client has already (-1:
    none), are not sent; text behind that token, a chunk of no tokens, is.
    """

    def __init__(
        self, id: str, enqueue_frame: EnqueueFrame, result_frame: ResultFrame, after: int = -1
    ) -> None:
        self.id = id
        self.subscription: LogSubscription | None = None
        self.is_cancel_requested = False
        self.is_ended = False
        self.waiting_for_model: str | None = None  # until a worker has begun
        self._enqueue_frame, self._after = enqueue_frame, after
        self._metrics: RequestMetrics | None = None
        self._early_records: list[Record] | None = []
        self._result_frame = result_frame
        self._admit_ms = 0.0

    def accept(
        self, subscription: LogSubscription, metrics: RequestMetrics, admit_ms: float
    ) -> None:
        """Send the frame `accepted`, and then the frames of records that came before.

        Call it once, as soon as the broker has confirmed that the request is stored. `admit_ms` is
        how long that took; it is shown to the client in `timing`.
        """
        self.subscription, self._metrics, self._admit_ms = subscription, metrics, admit_ms
        self._enqueue_frame(
            {"type": "accepted", "id": self.id, "request_id": subscription.request_id}
        )
        early_records, self._early_records = self._early_records, None
        for record in early_records or ():
            self._send_record(record)

    def send_waking(self, waking: Waking, now: float) -> None:
        """Send the frame `waking`: how far the first worker of the request's model is."""
        left = waking.seconds_left(now)
        frame = {"type": "waking", "id": self.id, "phase": waking.phase, "seconds_left": left}
        self._enqueue_frame(frame)

    def receive_record(self, record: Record, size: int) -> bool:
        """Turn a record into a frame and queue it; return False if the send buffer is full.

        The frame is queued in either case. This is the sink of the request's log subscription.
        """
        if self._early_records is not None:
            self._early_records.append(record)
            return True
        return self._send_record(record)

    def _send_record(self, record: Record) -> bool:
        assert self._metrics  # set by `accept`
        self._metrics.observe(record)
        kind = record["type"]
        self.waiting_for_model = None
        if kind == "chunk":
            return self._send_chunk(record)
        if kind == "result":
            self._result_frame.add(_result_items(record))
        elif kind == "started":
            return self._enqueue_frame(self._frame(record, "model", "version", "attempt"))
        elif kind == "done":
            self.is_ended = True
            return self._enqueue_frame(self._done_frame(record))
        elif kind == "error":
            self.is_ended = True
            return self._enqueue_frame(self._frame(record, "code", "message"))
        return True

    def _send_chunk(self, record: Record) -> bool:
        end = record["index"] + record["count"]
        if end <= self._after + 1 and (record["count"] or end <= self._after):
            return True
        if "logprobs" in record:
            return self._enqueue_frame(self._frame(record, "index", "count", "text", "logprobs"))
        return self._enqueue_frame(
            {
                "type": "chunk",
                "id": self.id,
                "index": record["index"],
                "count": record["count"],
                "text": record["text"],
            }
        )

    def _done_frame(self, record: Record) -> dict[str, Any] | EncodedFrame:
        """A `result` frame if there is a whole result, else `done`.

        A cancelled request may have stored a part of its result, which is not sent.
        """
        timing = {"admit": round(self._admit_ms, 3), **record["timing"]}
        if not self._result_frame or record["finish_reason"] == "cancelled":
            stopped = ("stop_sequence",) if "stop_sequence" in record else ()
            frame = self._frame(record, "finish_reason", *stopped, "usage")
            return frame | {"timing": timing}
        head = {"type": "result", "id": self.id, "usage": record["usage"], "timing": timing}
        return self._result_frame.finish(head)

    def _frame(self, record: Record, *names: str) -> dict[str, Any]:
        return {"type": record["type"], "id": self.id, **{name: record[name] for name in names}}


def _result_items(record: Record) -> Iterator[dict[str, Any]]:
    """The items of `data` for one record's rows: classifications if it has labels, else vectors."""
    labels = record.get("labels")
    for index, row in enumerate(record["vectors"], start=record["index"]):
        if labels:
            yield classification(index, row, labels)
        else:
            yield {"index": index, "embedding": unpack_floats(row)}
