"""Finds tool calls in generated text as it streams, and keeps them out of the client's text.

A model writes its calls as its chat template taught it to (`detect_format`), or, where the client
forces a call, as the grammar that constrains it says (`FORCED_CALLS`, `forced_function_format`). A
call is returned once it is whole and well formed; text that only looked like one is returned as
text. Pure.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

_SEPARATORS = " \t\r\n,;"  # Llama puts semicolons between its calls
_NAMED_CALL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_XML_MARKERS = ("<function=", "<arg_key>")  # Qwen3-Coder's and GLM's calls, which are not JSON
_ARGUMENTS = frozenset({"arguments", "parameters"})
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """A function call that a model wrote: the name, and the arguments as the text of a JSON object.

    The client sends the function's result back under `id`.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class ParsedDelta:
    """New output of a `ToolParser`: text to show to the client, and complete tool calls."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __add__(self, later: "ParsedDelta") -> "ParsedDelta":
        return ParsedDelta(self.text + later.text, self.calls + later.calls)


def parse_calls(body: str) -> list[ToolCall]:
    """Return the calls in `body`: one or more JSON objects with `name` and `arguments`.

    The objects may be in a list or follow one another. `parameters`, Llama's word, is taken for
    `arguments`, and a name alone is a call without arguments. The calls have no ids yet. Raises
    `ValueError` for text of any other form, and if there is no call.
    """
    calls = [_to_call(value) for value in _iterate_values(body)]
    if not calls:
        raise ValueError("there is no call in it")
    return calls


def _parse_mistral(body: str) -> list[ToolCall]:
    """Mistral's calls: a list of objects; since its tokeniser v11 name and arguments per call."""
    return [call for part in _split_outside_texts(body) for call in _parse_named(part)]


def _split_outside_texts(body: str) -> list[str]:
    """Split at the marks of calls; those within a JSON text belong to it."""
    parts: list[str] = []
    for piece in body.split(MISTRAL.begin):
        if parts and _is_inside_text(parts[-1]):
            parts[-1] += MISTRAL.begin + piece
        else:
            parts.append(piece)
    return parts


def _is_inside_text(json_text: str) -> bool:
    """Return True if JSON that is cut here is cut within one of its texts."""
    return _ESCAPED.sub("", json_text).count('"') % 2 == 1


def _parse_named(part: str) -> list[ToolCall]:
    named = _NAMED_CALL.fullmatch(part)
    return [_build_call(named[1], json.loads(named[2]))] if named else parse_calls(part)


def _iterate_values(text: str) -> Iterator[Any]:
    while text := text.lstrip(_SEPARATORS):
        value, end = _DECODER.raw_decode(text)
        yield from value if isinstance(value, list) else [value]
        text = text[end:]


def _to_call(value: object) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    if not value.keys() & _ARGUMENTS and value.keys() > {"name"}:
        raise ValueError("an object with a name and other fields is data, not a call")
    return _build_call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _build_call(name: object, arguments: object) -> ToolCall:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # a lone surrogate, which JSON can spell, is a ValueError here
    return ToolCall(name, text)


@dataclass(frozen=True)
class ToolCallFormat:
    """The form in which a model writes tool calls into its text.

    `begin` is the marker before a call, or before the first of several. `end` is the marker after
    it; if it is empty, the calls go on to the end of the text. A text that begins with one of the
    characters in `bare_starts` consists of calls alone, without a marker. `parse` turns what stands
    between the markers into calls, and raises `ValueError` if it is not well formed.
    """

    begin: str = ""
    end: str = ""
    bare_starts: str = ""
    parse: Callable[[str], list[ToolCall]] = parse_calls


HERMES = ToolCallFormat("<tool_call>", "</tool_call>")  # Qwen's, too
MISTRAL = ToolCallFormat("[TOOL_CALLS]", parse=_parse_mistral)
LLAMA = ToolCallFormat("<|python_tag|>", bare_starts="{")
FORCED_CALLS = ToolCallFormat(bare_starts="[")  # a list of calls and nothing else


def detect_format(template: str | None) -> ToolCallFormat | None:
    """Return the format in which a model with this chat template writes tool calls.

    None if the template is None or does not handle tools, or if its format is none of the known
    ones (Hermes, Mistral, Llama).
    """
    if template is None or not re.search(r"\btools\b", template):
        return None
    if any(marker in template for marker in _XML_MARKERS):
        return None
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return LLAMA  # the templates of its smaller models have no marker
    return next((each for each in (HERMES, MISTRAL, LLAMA) if each.begin in template), None)


def forced_function_format(name: str) -> ToolCallFormat:
    """Return the format for an answer that must be one call of the function `name`.

    A grammar constrains such an answer to the function's arguments, so its whole text is their
    JSON.
    """
    return ToolCallFormat(bare_starts="{", parse=lambda body: [_build_call(name, json.loads(body))])


class ToolParser:
    """Separates the text and the tool calls of one streamed answer.

    Give each piece of the answer to `push`, and call `finish` at its end. A call that is not well
    formed, or whose function is not among those `offered` (None allows any), is returned as text.
    White space before a call is dropped. If `parallel` is False, only the first call is returned.
    The ids of calls are derived from `request_id`, so an answer that is read again has the same
    ids.
    """

    def __init__(
        self,
        call_format: ToolCallFormat,
        request_id: str,
        parallel: bool = True,
        offered: Collection[str] | None = None,
    ) -> None:
        self._format, self._request_id, self._parallel = call_format, request_id, parallel
        self._offered = offered
        self._buffer = ""  # text that has not been returned yet
        self._opening: str | None = None  # inside a call: the text up to its marker's end
        self._searched = 0  # characters of the buffer without the begin of the call's end marker
        self._has_text = False  # text other than white space has come
        self.call_count = 0

    def push(self, text: str) -> ParsedDelta:
        """Take the next piece of the answer; return the text and calls that are certain by now.

        Text that may be the begin of a call, and a call that is not complete, are held back.
        """
        self._buffer += text
        found = ParsedDelta()
        while more := self._scan_text() if self._opening is None else self._scan_call():
            found += more
        return found

    def finish(self) -> ParsedDelta:
        """Return the text and calls that were held back, at the end of the answer.

        A call whose end marker is missing is returned as a call if it is complete, else as text.
        """
        found = ParsedDelta()
        while self._opening is not None:
            found += self._finish_call()
        rest, self._buffer = self._buffer, ""
        return found + ParsedDelta("" if self.call_count and rest.isspace() else rest)

    def _scan_text(self) -> ParsedDelta | None:
        """Text up to the next call, or as far as it is certainly text; None if more is needed."""
        if not self._has_text and self._begins_bare():
            return ParsedDelta()
        at = self._buffer.find(self._format.begin) if self._format.begin else -1
        if at < 0:
            return self._release_text(len(self._buffer) - self._partial_marker_length())
        text_delta = self._release_text(at) or ParsedDelta()
        marker_end = self._buffer.index(self._format.begin) + len(self._format.begin)
        self._opening, self._buffer = self._buffer[:marker_end], self._buffer[marker_end:]
        return text_delta

    def _begins_bare(self) -> bool:
        """True if the text consists of calls alone, as its first character tells."""
        stripped = self._buffer.lstrip()
        self._has_text = bool(stripped)
        if not stripped or stripped[0] not in self._format.bare_starts:
            return False
        self._opening = self._buffer[: len(self._buffer) - len(stripped)]
        self._buffer = stripped
        return True

    def _release_text(self, end: int) -> ParsedDelta | None:
        """Release the buffer up to `end`, except white space there; None if nothing is left."""
        text = self._buffer[:end].rstrip()
        self._buffer = self._buffer[len(text) :]
        return ParsedDelta(text) if text else None

    def _partial_marker_length(self) -> int:
        """Length of the longest end of the buffer that may be the begin of a call's marker."""
        begin, buffer = self._format.begin, self._buffer
        lengths = range(min(len(begin) - 1, len(buffer)), 0, -1)
        return next((length for length in lengths if begin.startswith(buffer[-length:])), 0)

    def _scan_call(self) -> ParsedDelta | None:
        end = self._format.end
        at = self._buffer.find(end, self._searched) if end else -1
        while at >= 0 and _is_inside_text(self._buffer[:at]):
            at = self._buffer.find(end, at + len(end))
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(end) + 1)
            return None
        body, self._buffer, self._searched = self._buffer[:at], self._buffer[at + len(end) :], 0
        return self._parse_body(body, end)

    def _finish_call(self) -> ParsedDelta:
        """Return the call whose end mark is missing, or stands in a text that was never closed."""
        opening, end, rest = self._opening, self._format.end, self._buffer
        self._buffer, self._searched = "", 0
        whole = self._parse_body(rest, "")
        if not whole.text or not end or end not in rest:
            return whole
        self._opening = opening
        body, _, rest = rest.partition(end)
        return self._parse_body(body, end) + self.push(rest)

    def _parse_body(self, body: str, end: str) -> ParsedDelta:
        """The calls in `body`; if it is not well formed all of it as text, with its markers."""
        opening, self._opening = self._opening or "", None
        try:
            calls = self._format.parse(body)
            self._check_offered(calls)
        except (ValueError, RecursionError):
            return ParsedDelta(opening + body + end)
        if not self._parallel:
            calls = [] if self.call_count else calls[:1]
        return ParsedDelta(calls=[self._with_id(call) for call in calls])

    def _check_offered(self, calls: list[ToolCall]) -> None:
        """Raise `ValueError` for a call of a function that the client did not offer."""
        if self._offered is not None and not all(call.name in self._offered for call in calls):
            raise ValueError("no such function was offered")

    def _with_id(self, call: ToolCall) -> ToolCall:
        """Give the call its id: nine letters and digits, as Mistral's templates require."""
        number, self.call_count = self.call_count, self.call_count + 1
        return replace(call, id=f"{self._request_id[:7]}{number:02}")
