"""Cuts a multipart/form-data body (RFC 7578) into its fields and its one file. Pure."""

from dataclasses import dataclass

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from streams.errors import BadRequest, UnsupportedMediaType

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16


@dataclass(frozen=True)
class FormField:
    """A field of the form that is no file."""

    name: str
    value: str


@dataclass(frozen=True)
class FileBegin:
    """The head of the form's file; its bytes follow."""

    name: str
    filename: str
    content_type: str


FormEvent = FormField | FileBegin | bytes


class MultipartReader:
    """Parses a body as it comes in; nothing of the file is kept here.

    Raises `UnsupportedMediaType` unless `content_type`, the value of that header, is
    multipart/form-data with a boundary.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data":
            shown = content_type or "missing"
            raise UnsupportedMediaType(f"Content-Type is {shown}, not multipart/form-data")
        if not options.get(b"boundary"):
            raise UnsupportedMediaType(
                f"Content-Type is {content_type}, without a boundary: leave the header to your "
                "HTTP library, which adds one"
            )
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        self._events: list[FormEvent] = []
        self._headers: dict[bytes, bytes] = {}
        self._header_name, self._header_value = b"", b""
        self._field: bytearray | None = None  # the value of the field that is being read
        self._field_name = ""
        self._fields = 0
        self._has_file, self.is_complete = False, False

    def feed(self, data: bytes) -> list[FormEvent]:
        """Return what `data` completes, in the order in which it came.

        Raises `BadRequest` for bytes that are no such body, for a second file, and for too many or
        too long fields.
        """
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise BadRequest(f"the body is not multipart/form-data: {error}") from None
        events, self._events = self._events, []
        return events

    def _begin_part(self) -> None:
        self._headers = {}

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name, self._header_value = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        self._field_name, self._field = name, bytearray() if filename is None else None
        if filename is None:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise BadRequest(f"the form has more than {MAX_FIELDS} fields")
            return
        if self._has_file:
            raise BadRequest("the form has more than one file", name)
        self._has_file = True
        content_type = self._headers.get(b"content-type", b"").decode(errors="replace")
        self._events.append(FileBegin(name, filename.decode(errors="replace"), content_type))

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._events.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            raise BadRequest(
                f"the field {self._field_name!r} has more than {MAX_FIELD_BYTES} bytes: the file "
                "itself needs a filename",
                self._field_name,
            )

    def _end_part(self) -> None:
        if self._field is not None:
            value = self._field.decode(errors="replace")
            self._events.append(FormField(self._field_name, value))

    def _end(self) -> None:
        self.is_complete = True
