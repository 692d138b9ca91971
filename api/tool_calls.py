"""Calls of tools in generated text: found as it streams, and kept out of what the client reads.

A model writes its calls as its chat template taught it to (`written_by`), or, where the client
forces a call, as the grammar that constrains it says (`forced`, `forced_to`). A call is given out
when it is whole and well formed; text that only looked like one is given back as text. Pure.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

_SEPARATORS = " \t\r\n,;"  # Llama puts semicolons between its calls
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_XML = ("<function=", "<arg_key>")  # Qwen3-Coder's and GLM's calls, which are no JSON
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """A function's name and its arguments, a JSON object as text; `id` is for the answer to it."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class ParsedDelta:
    """What a piece of text has made certain: text for the reader, and calls."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def parse_calls(body: str) -> list[ToolCall]:
    """Objects with `name` and `arguments`, in a list or one after another.

    `parameters` is Llama's word for arguments. Raises `ValueError` for anything else.
    """
    calls = [_to_call(value) for value in _iterate_values(body)]
    if not calls:
        raise ValueError("there is no call in it")
    return calls


def _parse_mistral(body: str) -> list[ToolCall]:
    """A list of objects; since its eleventh tokeniser a name and its arguments, for each call."""
    return [call for part in body.split(MISTRAL.begin) for call in _parse_named(part)]


def _parse_named(part: str) -> list[ToolCall]:
    named = _NAMED.fullmatch(part)
    return [_build_call(named[1], json.loads(named[2]))] if named else parse_calls(part)


def _iterate_values(text: str) -> Iterator[Any]:
    while text := text.lstrip(_SEPARATORS):
        value, end = _DECODER.raw_decode(text)
        yield from value if isinstance(value, list) else [value]
        text = text[end:]


def _to_call(value: object) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    return _build_call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _build_call(name: object, arguments: object) -> ToolCall:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # half a character, which JSON can spell, is a ValueError here
    return ToolCall(name, text)


@dataclass(frozen=True)
class ToolCallFormat:
    """How calls are written.

    `begin` marks a call, or the first of them; without `end` calls go on to the end of the text. A
    text that begins with one of the characters in `bare` is calls altogether.
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
    """How a model with this chat template writes calls; None for no way that is known here."""
    if template is None or not re.search(r"\btools\b", template):
        return None
    if any(mark in template for mark in _XML):
        return None
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return LLAMA  # the smaller ones have no marker in their template
    return next((form for form in (HERMES, MISTRAL, LLAMA) if form.begin in template), None)


def forced_function_format(name: str) -> ToolCallFormat:
    """One call of a certain function: the text is its arguments."""
    return ToolCallFormat(bare_starts="{", parse=lambda body: [_build_call(name, json.loads(body))])


class ToolParser:
    """Takes a text in pieces; what comes out joined does not depend on where they were cut.

    White space before a call belongs to neither side. Without `parallel` only the first call is
    given out. Ids follow from `request_id`: whoever reads an answer again finds them again.
    """

    def __init__(self, form: ToolCallFormat, request_id: str, parallel: bool = True) -> None:
        self._format, self._request_id, self._parallel = form, request_id, parallel
        self._buffer = ""  # not given out yet
        self._opening: str | None = None  # how the call began in which we are
        self._searched = 0  # so much of what is held has been searched for the call's end
        self._has_text = False  # some text has been seen
        self.call_count = 0

    def push(self, text: str) -> ParsedDelta:
        """The next piece of the text."""
        self._buffer += text
        found = ParsedDelta()
        while more := self._scan_text() if self._opening is None else self._scan_call():
            found = ParsedDelta(found.text + more.text, found.calls + more.calls)
        return found

    def finish(self) -> ParsedDelta:
        """What was still held back. A call without its end counts, if it is whole."""
        held, self._buffer = self._buffer, ""
        if self._opening is not None:
            return self._parse_body(held, "")
        return ParsedDelta("" if self.call_count and held.isspace() else held)

    def _scan_text(self) -> ParsedDelta | None:
        """Text up to the next call, or as far as it is certain to be text; None to wait."""
        if not self._has_text and self._begins_bare():
            return ParsedDelta()
        at = self._buffer.find(self._format.begin) if self._format.begin else -1
        if at < 0:
            return self._release_text(len(self._buffer) - self._partial_marker_length())
        said = self._release_text(at) or ParsedDelta()
        mark = self._buffer.index(self._format.begin) + len(self._format.begin)
        self._opening, self._buffer = self._buffer[:mark], self._buffer[mark:]
        return said

    def _begins_bare(self) -> bool:
        """Whether the whole text is a call, which its first character tells."""
        stripped = self._buffer.lstrip()
        self._has_text = bool(stripped)
        if not stripped or stripped[0] not in self._format.bare_starts:
            return False
        self._opening = self._buffer[: len(self._buffer) - len(stripped)]
        self._buffer = stripped
        return True

    def _release_text(self, end: int) -> ParsedDelta | None:
        """Give out what is held up to `end`, but for white space at its end."""
        text = self._buffer[:end].rstrip()
        self._buffer = self._buffer[len(text) :]
        return ParsedDelta(text) if text else None

    def _partial_marker_length(self) -> int:
        """The length of the longest end of what is held that the marker begins with."""
        begin, held = self._format.begin, self._buffer
        lengths = range(min(len(begin) - 1, len(held)), 0, -1)
        return next((length for length in lengths if begin.startswith(held[-length:])), 0)

    def _scan_call(self) -> ParsedDelta | None:
        end = self._format.end
        at = self._buffer.find(end, self._searched) if end else -1
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(end) + 1)
            return None
        body, self._buffer, self._searched = self._buffer[:at], self._buffer[at + len(end) :], 0
        return self._parse_body(body, end)

    def _parse_body(self, body: str, end: str) -> ParsedDelta:
        """The calls in `body`, or all of it as text, as it came."""
        opening, self._opening = self._opening or "", None
        try:
            calls = self._format.parse(body)
        except (ValueError, RecursionError):
            return ParsedDelta(opening + body + end)
        if not self._parallel:
            calls = [] if self.call_count else calls[:1]
        return ParsedDelta(calls=[self._with_id(call) for call in calls])

    def _with_id(self, call: ToolCall) -> ToolCall:
        """With its id: nine letters and digits, since Mistral's templates take no other."""
        number, self.call_count = self.call_count, self.call_count + 1
        return replace(call, id=f"{self._request_id[:7]}{number:02}")
