"""Multipart bodies, as clients send them and as they should not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.entrypoints.files.multipart_reader import (
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    FileBegin,
    FormEvent,
    FormField,
    MultipartReader,
)
from streams.errors import BadRequest, UnsupportedMediaType

BOUNDARY = "a-boundary"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def field(name: str, value: str) -> bytes:
    return (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
    ).encode()


def file(data: bytes, name: str = "file", filename: str = "in.jsonl") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"'
    return f"{head}\r\nContent-Type: text/plain\r\n\r\n".encode() + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


def read(body: bytes, piece: int = 1_000_000) -> tuple[list[FormEvent], bool]:
    """All events, the file's bytes joined, and whether the body was complete."""
    reader = MultipartReader(CONTENT_TYPE)
    events: list[FormEvent] = []
    for start in range(0, len(body), piece):
        for event in reader.feed(body[start : start + piece]):
            if isinstance(event, bytes) and events and isinstance(events[-1], bytes):
                events[-1] += event
            else:
                events.append(event)
    return events, reader.is_complete


@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_come_out_as_they_were_however_they_are_cut(data: bytes, piece: int) -> None:
    """Networks cut where they like, and a file may contain what looks like a boundary."""
    body = field("purpose", "batch") + file(data + b"\r\n--a-bound") + END
    events, complete = read(body, piece)
    assert complete
    head = FileBegin("file", "in.jsonl", "text/plain")
    assert events == [FormField("purpose", "batch"), head, data + b"\r\n--a-bound"]


def test_a_body_that_ends_early_is_not_complete() -> None:
    """Half a file must not be taken for a whole one."""
    events, complete = read(file(b"half of it")[:-2])
    assert not complete
    assert isinstance(events[0], FileBegin)


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data"])
def test_another_content_type_is_refused(content_type: str) -> None:
    """The client hears what is expected instead."""
    with pytest.raises(UnsupportedMediaType, match="multipart/form-data"):
        MultipartReader(content_type)


def test_a_missing_boundary_is_told() -> None:
    """A client that sets the header itself has lost it."""
    with pytest.raises(UnsupportedMediaType, match="without a boundary"):
        MultipartReader("multipart/form-data")


@pytest.mark.parametrize(
    "body",
    [
        b"no boundary here at all, and more than a boundary's length of it",
        file(b"one") + file(b"two"),
        field("purpose", "x" * (MAX_FIELD_BYTES + 1)),
        b"".join(field(f"f{n}", "x") for n in range(MAX_FIELDS + 1)),
        f"--{BOUNDARY}\r\n{'x' * 100_000}".encode(),
    ],
    ids=["garbage", "two files", "long field", "many fields", "endless header"],
)
def test_a_body_that_no_form_has_is_refused(body: bytes) -> None:
    """And nothing of it is kept."""
    with pytest.raises(BadRequest):
        read(body + END)
