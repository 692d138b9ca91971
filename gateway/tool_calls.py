"""Calls of tools in generated text: found as it streams, and kept out of what the client reads.

A model writes its calls as its chat template taught it to (`written_by`), or, where the client
forces a call, as the grammar that constrains it says (`forced`, `forced_to`). A call is given out
when it is whole and well formed; text that only looked like one is given back as text.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

_BETWEEN = " \t\r\n,;"  # Llama puts semicolons between its calls
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
class Said:
    """What a piece of text has made certain: text for the reader, and calls."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def read_calls(body: str) -> list[ToolCall]:
    """Objects with `name` and `arguments`, in a list or one after another.

    `parameters` is Llama's word for arguments. Raises `ValueError` for anything else.
    """
    calls = [_call(value) for value in _values(body)]
    if not calls:
        raise ValueError("there is no call in it")
    return calls


def _read_mistral(body: str) -> list[ToolCall]:
    """A list of objects; since its eleventh tokeniser a name and its arguments, for each call."""
    return [call for part in body.split(MISTRAL.begin) for call in _read_named(part)]


def _read_named(part: str) -> list[ToolCall]:
    named = _NAMED.fullmatch(part)
    return [_made(named[1], json.loads(named[2]))] if named else read_calls(part)


def _values(text: str) -> Iterator[Any]:
    while text := text.lstrip(_BETWEEN):
        value, end = _DECODER.raw_decode(text)
        yield from value if isinstance(value, list) else [value]
        text = text[end:]


def _call(value: object) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    return _made(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _made(name: object, arguments: object) -> ToolCall:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # half a character, which JSON can spell, is a ValueError here
    return ToolCall(name, text)


@dataclass(frozen=True)
class Format:
    """How calls are written.

    `begin` marks a call, or the first of them; without `end` calls go on to the end of the text. A
    text that begins with one of the characters in `bare` is calls altogether.
    """

    begin: str = ""
    end: str = ""
    bare: str = ""
    read: Callable[[str], list[ToolCall]] = read_calls


HERMES = Format("<tool_call>", "</tool_call>")  # Qwen's, too
MISTRAL = Format("[TOOL_CALLS]", read=_read_mistral)
LLAMA = Format("<|python_tag|>", bare="{")
FORCED = Format(bare="[")  # a list of calls and nothing else


def written_by(template: str | None) -> Format | None:
    """How a model with this chat template writes calls; None for no way that is known here."""
    if template is None or not re.search(r"\btools\b", template):
        return None
    if any(mark in template for mark in _XML):
        return None
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return LLAMA  # the smaller ones have no marker in their template
    return next((form for form in (HERMES, MISTRAL, LLAMA) if form.begin in template), None)


def forced_to(name: str) -> Format:
    """One call of a certain function: the text is its arguments."""
    return Format(bare="{", read=lambda body: [_made(name, json.loads(body))])


class ToolParser:
    """Takes a text in pieces; what comes out joined does not depend on where they were cut.

    White space before a call belongs to neither side. Without `parallel` only the first call is
    given out. Ids follow from `request_id`: whoever reads an answer again finds them again.
    """

    def __init__(self, form: Format, request_id: str, parallel: bool = True) -> None:
        self._form, self._request_id, self._parallel = form, request_id, parallel
        self._held = ""  # not given out yet
        self._opening: str | None = None  # how the call began in which we are
        self._sought = 0  # so much of what is held has been searched for the call's end
        self._begun = False  # some text has been seen
        self.called = 0

    def push(self, text: str) -> Said:
        """The next piece of the text."""
        self._held += text
        found = Said()
        while more := self._outside() if self._opening is None else self._inside():
            found = Said(found.text + more.text, found.calls + more.calls)
        return found

    def finish(self) -> Said:
        """What was still held back. A call without its end counts, if it is whole."""
        held, self._held = self._held, ""
        if self._opening is not None:
            return self._read(held, "")
        return Said("" if self.called and held.isspace() else held)

    def _outside(self) -> Said | None:
        """Text up to the next call, or as far as it is certain to be text; None to wait."""
        if not self._begun and self._is_bare():
            return Said()
        at = self._held.find(self._form.begin) if self._form.begin else -1
        if at < 0:
            return self._text(len(self._held) - self._may_begin())
        said = self._text(at) or Said()
        mark = self._held.index(self._form.begin) + len(self._form.begin)
        self._opening, self._held = self._held[:mark], self._held[mark:]
        return said

    def _is_bare(self) -> bool:
        """Whether the whole text is a call, which its first character tells."""
        stripped = self._held.lstrip()
        self._begun = bool(stripped)
        if not stripped or stripped[0] not in self._form.bare:
            return False
        self._opening = self._held[: len(self._held) - len(stripped)]
        self._held = stripped
        return True

    def _text(self, end: int) -> Said | None:
        """Give out what is held up to `end`, but for white space at its end."""
        text = self._held[:end].rstrip()
        self._held = self._held[len(text) :]
        return Said(text) if text else None

    def _may_begin(self) -> int:
        """The length of the longest end of what is held that the marker begins with."""
        begin, held = self._form.begin, self._held
        lengths = range(min(len(begin) - 1, len(held)), 0, -1)
        return next((length for length in lengths if begin.startswith(held[-length:])), 0)

    def _inside(self) -> Said | None:
        end = self._form.end
        at = self._held.find(end, self._sought) if end else -1
        if at < 0:
            self._sought = max(0, len(self._held) - len(end) + 1)
            return None
        body, self._held, self._sought = self._held[:at], self._held[at + len(end) :], 0
        return self._read(body, end)

    def _read(self, body: str, end: str) -> Said:
        """The calls in `body`, or all of it as text, as it came."""
        opening, self._opening = self._opening or "", None
        try:
            calls = self._form.read(body)
        except (ValueError, RecursionError):
            return Said(opening + body + end)
        if not self._parallel:
            calls = [] if self.called else calls[:1]
        return Said(calls=[self._numbered(call) for call in calls])

    def _numbered(self, call: ToolCall) -> ToolCall:
        """With its id: nine letters and digits, since Mistral's templates take no other."""
        number, self.called = self.called, self.called + 1
        return replace(call, id=f"{self._request_id[:7]}{number:02}")
