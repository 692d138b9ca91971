"""Keeps control tokens that a client writes in a message from being taken for the template's.

Without it a user who writes `<end_of_turn>` ends the turn, and speaks in another's name. Pure.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

_PRIVATE_USE = range(0xE000, 0xF900)  # characters that no text has, as a rule


class ControlTokens:
    """Texts that a tokeniser turns into tokens with a meaning: those of its special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if len(text) > 1)
        self._lengths = sorted({*map(len, self._texts)})
        starts = "".join(map(re.escape, sorted({text[0] for text in self._texts})))
        self._start = re.compile(f"[{starts}]") if starts else None

    def cut(self, value: Any) -> tuple[str, Any]:
        """Return a mark, and a copy of plain JSON in which the mark cuts every control token.

        Text that is split at the mark and encoded piece by piece has no control tokens but those
        that stand outside of `value`. The mark is empty where there is nothing to cut.
        """
        texts = list(_texts(value))
        if not any(map(self._places, texts)):
            return "", value
        used = frozenset().union(*texts)
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)
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
