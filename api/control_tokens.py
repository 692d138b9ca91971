"""Keeps control tokens that a client writes in a message from being taken for the template's.

Without it a user who writes `<end_of_turn>` ends the turn, and speaks in another's name. Pure.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from streams.errors import BadRequest

_PRIVATE_USE = range(0xE000, 0xF900)  # characters that no text has, as a rule


class ControlTokens:
    """The texts that a tokeniser turns into control tokens, such as `<end_of_turn>`.

    There is one for each tokeniser. Its use is to let a client write such a text in a message
    without getting the token; only the chat template may write the token.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if len(text) > 1)
        self._lengths = sorted({*map(len, self._texts)})
        starts = "".join(map(re.escape, sorted({text[0] for text in self._texts})))
        self._start = re.compile(f"[{starts}]") if starts else None

    def cut(self, value: Any) -> tuple[str, Any]:
        """Return a mark, and a copy of `value` that has the mark inside of each control text.

        `value` is plain JSON. The mark is one character that does not occur in `value`. The caller
        renders the copy, splits the text at the mark, and encodes the pieces separately: no control
        text of `value` then becomes a token, and those outside of it still do. The mark is empty,
        and `value` is returned itself, if it has no control text.
        Raises `BadRequest` if no character is left for the mark.
        """
        texts = list(_texts(value))
        if not any(map(self._places, texts)):
            return "", value
        used = frozenset().union(*texts)
        mark = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
        if mark is None:
            raise BadRequest("the messages use all private characters of Unicode", "messages")
        return mark, self._cut(value, mark)

    def _cut(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            ends = [0, *(place + 1 for place in self._places(value)), len(value)]
            return mark.join(value[a:b] for a, b in pairwise(ends))
        if isinstance(value, dict):
            return {self._cut(name, mark): self._cut(each, mark) for name, each in value.items()}
        return [self._cut(each, mark) for each in value] if isinstance(value, list) else value

    def _places(self, text: str) -> list[int]:
        """The indices at which control tokens begin in a text."""
        if self._start is None:
            return []
        starts = (found.start() for found in self._start.finditer(text))
        return [at for at in starts if any(text[at : at + n] in self._texts for n in self._lengths)]


def _texts(value: Any) -> Iterable[str]:
    """Yield every text in plain JSON, names included."""
    nodes = [value]
    while nodes:
        node = nodes.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            nodes += [*node, *node.values()]
        elif isinstance(node, list):
            nodes += node
