"""Responses of the broker to stores, reads and clock samples: parsed into values or errors."""

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
from streams.headers import STORED_AT

T = TypeVar("T")

# The second one comes in a cluster, while another message of the subject is being replicated.
CAS_ERROR_CODES = frozenset({10071, 10164})
_STORE_FAILED = 10077  # a limit of messages or bytes, of the stream or of a subject, is reached
_IN_PROCESS = 10158  # in a cluster, while a message with the same id is being replicated
_END_OF_BATCH, _NOT_FOUND, _NO_RESPONDERS = "204", "404", "503"


class StreamMissing(BrokerUnavailable):
    """No stream has this subject, or it has no leader at the moment."""


class StoreRefused(MillstreamError):
    """The broker answered that it does not store a message.

    `error_code` is JetStream's number for the reason, `description` its text.
    """

    code = "overloaded"

    def __init__(self, error_code: int, description: str) -> None:
        super().__init__(f"{description} ({error_code})")
        self.error_code, self.description = error_code, description

    @property
    def is_full(self) -> bool:
        """True if the stream has no room at the moment; else it refuses this message for good."""
        return self.error_code == _STORE_FAILED

    @property
    def is_conflict(self) -> bool:
        """True if another message came first: the subject's last sequence was not as expected."""
        return self.error_code in CAS_ERROR_CODES


@dataclass(frozen=True, slots=True)
class PubAck:
    """The broker's confirmation that a message is stored; `seq` is its sequence in the stream.

    `duplicate` means that an earlier message with the same message id is stored, and `seq` is that
    one's. `total` is the counter's new value if the message was an increment (ADR-49), else None.
    `repeated` means that the message was sent more than once, so that it may be a duplicate of
    itself.
    """

    seq: int
    duplicate: bool
    total: int | None = None
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message read back from a stream; `seq` is its sequence there."""

    seq: int
    subject: str
    data: bytes
    headers: Mapping[str, str]

    @property
    def stored_at(self) -> float:
        """Time of storage, in epoch seconds. KeyError unless a direct get has read it."""
        return datetime.fromisoformat(self.headers[STORED_AT]).timestamp()


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Some stored messages in order; `remaining` is how many more match after the last one."""

    messages: list[StoredMessage]
    remaining: int


class PendingResponse(ABC, Generic[T]):
    """The response to one question to the broker, which a caller awaits as `future`.

    `future` gets the parsed value, or an error of ours (`MillstreamError`). The inbox passes
    messages from the broker to `receive`. `resend`, if set, sends the question again; it is used
    while no response comes.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.resend: Callable[[], object] | None = None
        self.repeated = False

    def repeat(self) -> None:
        """Send the question again, unless it may not be repeated or the response is complete."""
        if self.resend and not self.future.done():
            self.repeated = True
            self.resend()

    def receive(self, data: bytes, headers: bytes) -> None:
        """Parse one message of the response, given as payload and header block.

        The future is completed if this is the last message: by the value, by the error that the
        broker reports, or by `BrokerUnavailable` if the message cannot be read. Nothing is raised
        here, and messages after that are ignored.
        """
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
        """Complete the future with an error, unless it is complete already. Idempotent."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # asyncio would complain if the caller has given up by now

    def close(self) -> None:
        """Drop the future; call this last, when the caller has its outcome.

        An error holds its frames, and these hold this object: keeping the future would make a
        cycle.
        """
        del self.future

    @abstractmethod
    def _parse(self, data: bytes, headers: Mapping[str, str]) -> T | None:
        """Return the value, or None while more messages must come; raises an error of ours."""


class PendingPubAck(PendingResponse[PubAck]):
    """Response to a published message that is to be stored: its confirmation (`PubAck`)."""

    def _parse(self, data: bytes, headers: Mapping[str, str]) -> PubAck:
        if status := headers.get("Status"):  # 503: no stream's leader listens
            raise StreamMissing(f"no stream accepts this subject at the moment ({status})")
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
    """Response to a question about a stream, in which the broker also states its time (`ts`)."""

    def __init__(self) -> None:
        super().__init__()
        self._sent_at = ticks()

    def _parse(self, data: bytes, headers: Mapping[str, str]) -> ClockSample:
        received_at, answer = ticks(), orjson.loads(data or b"{}")
        if "ts" not in answer:  # the stream does not exist yet, or has no leader
            raise BrokerUnavailable(f"the answer has no time: {answer or dict(headers)}")
        server_time = datetime.fromisoformat(answer["ts"]).timestamp()
        return ClockSample(self._sent_at, received_at, server_time)


class PendingRead(PendingResponse[MessagePage]):
    """Response to a direct get (ADR-31), as a page of messages.

    It is complete after one message or, with `batched`, after the marker that ends many.
    """

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self._batched = batched
        self._found: list[StoredMessage] = []

    def _parse(self, data: bytes, headers: Mapping[str, str]) -> MessagePage | None:
        status = headers.get("Status")
        if status in (_END_OF_BATCH, _NOT_FOUND):
            return MessagePage(self._found, int(headers.get("Nats-Num-Pending", "0")))
        if status == _NO_RESPONDERS:
            raise StreamMissing("the stream cannot be read at the moment")
        if status is not None:
            raise BrokerUnavailable(f"the read failed: status {status}")
        self._found.append(_parse_stored_message(headers, data))
        return None if self._batched else MessagePage(self._found, 0)


def _parse_stored_message(headers: Mapping[str, str], data: bytes) -> StoredMessage:
    return StoredMessage(int(headers["Nats-Sequence"]), headers["Nats-Subject"], data, headers)
