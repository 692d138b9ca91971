"""What a worker tells of its prefix cache: what is new, what is gone, at times everything. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from streams import marks

MOST_MARKS = 2048  # the most recently used: 16 KB, told now and then
LOOK_SECONDS = 0.1
WHOLE_SECONDS = 10.0  # a beat is at most once: by then whoever has missed one knows all again


@dataclass(frozen=True)
class Told:
    """A part of a beat: packed marks; with `holds_only` there is nothing but `holds`."""

    holds: bytes = b""
    dropped: bytes = b""
    holds_only: bool = False


class Holdings:
    """Remembers what was told, so that beats are short."""

    def __init__(self) -> None:
        self._told: frozenset[int] = frozenset()
        self._looked_at = self._whole_at = float("-inf")

    def tell_all(self) -> None:
        """Somebody is new here and knows nothing."""
        self._looked_at = self._whole_at = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether it is worth looking at what is held."""
        return now - self._looked_at >= LOOK_SECONDS

    def tell(self, held: Sequence[int], now: float) -> Told:
        """What to tell, given the marks of all that is held, least recently used first."""
        before, self._told = self._told, frozenset(held[-MOST_MARKS:])
        self._looked_at = now
        if now - self._whole_at >= WHOLE_SECONDS:
            self._whole_at = now
            return Told(marks.pack(self._told), holds_only=True)
        return Told(marks.pack(self._told - before), marks.pack(before - self._told))
