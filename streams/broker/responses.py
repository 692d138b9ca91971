"""What the broker answers to a store or a read, and who waits for it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

import orjson

from streams.broker.cluster_clock import ClockSample, ticks
from streams.broker.nats_wire import parse_headers
from streams.errors import BrokerUnavailable, MillstreamError

T = TypeVar("T")

# The second one in a cluster, where another message of the subject is still on its way.
CAS_ERROR_CODES = frozenset({10071, 10164})
_IN_PROCESS = 10158  # in a cluster, a message with this id
_END_OF_BATCH, _NOT_FOUND = "204", "404"


class StoreRefused(MillstreamError):
    """The broker answered and said no; `error_code` is JetStream's, `description` its reason."""

    code = "overloaded"

    def __init__(self, error_code: int, description: str) -> None:
        super().__init__(f"{description} ({error_code})")
        self.error_code, self.description = error_code, description

    @property
    def is_conflict(self) -> bool:
        """True when the subject's last sequence was not the expected one."""
        return self.error_code in CAS_ERROR_CODES


@dataclass(frozen=True, slots=True)
class PubAck:
    """Where a message was stored; `duplicate` means an earlier message with its id already was.

    `total` is the counter's new value where the message was an increment (ADR-49). `repeated`: it
    was sent before without an answer, so that it may be a duplicate of itself.
    """

    seq: int
    duplicate: bool
    total: int | None = None
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message read back from a stream."""

    seq: int
    subject: str
    data: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Messages read back, and how many more match behind them."""

    messages: list[StoredMessage]
    remaining: int


class PendingResponse(ABC, Generic[T]):
    """One awaited answer; `take` gets its messages, `future` its value or an error of ours.

    What may be asked again while it does not come is asked by `ask`.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.resend: Callable[[], object] | None = None
        self.repeated = False

    def repeat(self) -> None:
        """Ask again, if that may be done and the answer has not come."""
        if self.resend and not self.future.done():
            self.repeated = True
            self.resend()

    def receive(self, data: bytes, headers: bytes) -> None:
        """One message: its payload and its header block."""
        if self.future.done():
            return
        try:
            value = self._parse(data, parse_headers(headers) if headers else {})
        except MillstreamError as error:
            self.future.set_exception(error)
        except (ValueError, KeyError) as error:
            self.future.set_exception(BrokerUnavailable(f"unreadable answer: {error!r}"))
        else:
            if value is not None:
                self.future.set_result(value)

    def fail(self, error: MillstreamError) -> None:
        """It will not come. Idempotent."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # asyncio would complain if its asker has given up by now

    def close(self) -> None:
        """Its asker has the outcome. An error holds its frames, and these this answer: a cycle."""
        del self.future

    @abstractmethod
    def _parse(self, data: bytes, headers: Mapping[str, str]) -> T | None:
        """The value, or None while more messages must come."""


class PendingPubAck(PendingResponse[PubAck]):
    """The answer to a store: one message."""

    def _parse(self, data: bytes, headers: Mapping[str, str]) -> PubAck:
        if status := headers.get("Status"):  # 503: no stream's leader listens
            raise BrokerUnavailable(f"no stream takes this subject just now ({status})")
        answer = orjson.loads(data)
        if error := answer.get("error"):
            code, description = error.get("err_code", 0), error.get("description", "")
            if code == _IN_PROCESS:
                raise BrokerUnavailable("an earlier try is still being stored")
            raise StoreRefused(code, description)
        total = answer.get("val")
        duplicate = answer.get("duplicate", False)
        return PubAck(answer["seq"], duplicate, None if total is None else int(total))


class PendingClockSample(PendingResponse[ClockSample]):
    """The answer to a question about a stream, to which the broker adds what time it was."""

    def __init__(self) -> None:
        super().__init__()
        self._sent_at = ticks()

    def _parse(self, data: bytes, headers: Mapping[str, str]) -> ClockSample:
        answered, answer = ticks(), orjson.loads(data or b"{}")
        if "ts" not in answer:  # there is no such stream yet, or no leader of it
            raise BrokerUnavailable(f"the time is not told: {answer or dict(headers)}")
        return ClockSample(
            self._sent_at, answered, datetime.fromisoformat(answer["ts"]).timestamp()
        )


class PendingRead(PendingResponse[MessagePage]):
    """The answer to a direct get (ADR-31): one message, or with `batched` many and an end."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self._batched = batched
        self._found: list[StoredMessage] = []

    def _parse(self, data: bytes, headers: Mapping[str, str]) -> MessagePage | None:
        status = headers.get("Status")
        if status in (_END_OF_BATCH, _NOT_FOUND):
            return MessagePage(self._found, int(headers.get("Nats-Num-Pending", "0")))
        if status is not None:
            raise BrokerUnavailable(f"not read: status {status}")
        self._found.append(_parse_stored_message(headers, data))
        return None if self._batched else MessagePage(self._found, 0)


def _parse_stored_message(headers: Mapping[str, str], data: bytes) -> StoredMessage:
    return StoredMessage(int(headers["Nats-Sequence"]), headers["Nats-Subject"], data, headers)
