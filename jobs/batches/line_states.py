"""States of a batch's lines: due, under way, or ended, and how often tried. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from api.batches.batch_line import BatchLine, InputLine

MAX_TRIES = 3  # that a worker has begun
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0


@dataclass(frozen=True)
class LineState:
    """A line that has no result yet.

    `attempt` is the number of its current try, from 1, and `begun` how many of those before it a
    worker had begun. It is to be published at `due` (seconds of any one clock); None while its
    request is under way, which it must have left by `overdue`.
    """

    source: InputLine
    line: BatchLine
    attempt: int = 1
    begun: int = 0
    due: float | None = 0.0
    overdue: float = 0.0

    @property
    def is_last(self) -> bool:
        """True if a failure of the current try ends the line."""
        return self.begun + 1 >= MAX_TRIES


class LineStates:
    """The lines of a batch between its watermark and the last one that was read.

    All lines before `watermark`, which begins at the byte `offset`, have ended.
    """

    def __init__(self, watermark: int, offset: int, tries: Mapping[str, tuple[int, int]]) -> None:
        self.watermark, self.offset = watermark, offset
        self._open: dict[int, LineState] = {}
        self._ends: dict[int, int] = {}  # of lines behind the watermark: where the next one begins
        self._ended: set[int] = set()
        self._tries = {int(index): each for index, each in tries.items()}
        self.bytes = 0  # of all open lines

    def __len__(self) -> int:
        """Return the number of lines that were read and have no result."""
        return len(self._open)

    @property
    def span(self) -> int:
        """Return how many lines there are from the watermark to the last one that was read."""
        return len(self._ends)

    @property
    def tries(self) -> dict[str, tuple[int, int]]:
        """The tries of lines that are not at their first, for the batch's record."""
        open_tries = {i: (line.attempt, line.begun) for i, line in self._open.items()}
        return {str(i): each for i, each in open_tries.items() if each != (1, 0)}

    def add(self, source: InputLine, line: BatchLine) -> None:
        """Take in the next line that was read; it is due at once, unless it has ended before."""
        self._ends[source.index] = source.end
        if source.index in self._ended:
            self._advance()
            return
        attempt, begun = self._tries.pop(source.index, (1, 0))
        self._open[source.index] = LineState(source, line, attempt, begun)
        self.bytes += source.end - source.offset

    def get(self, index: int) -> LineState | None:
        """Return a line that is open; None for any other."""
        return self._open.get(index)

    def has_ended(self, index: int) -> bool:
        """True if a line is known to have its result."""
        return index < self.watermark or index in self._ended

    def iterate_due(self, now: float) -> Iterator[LineState]:
        """Yield the lines that are to be published now, in order."""
        for state in list(self._open.values()):
            if state.due is not None and state.due <= now:
                yield state

    def iterate_under_way(self) -> Iterator[LineState]:
        """Yield the lines whose requests are under way."""
        yield from (state for state in self._open.values() if state.due is None)

    def mark_published(self, index: int, overdue: float) -> None:
        """Note that a line's request was published, and must have ended by `overdue`."""
        if state := self._open.get(index):
            self._open[index] = replace(state, due=None, overdue=overdue)

    def delay(self, index: int, due: float) -> None:
        """Note that a line could not be published, and is to be tried again, as the same try."""
        if state := self._open.get(index):
            self._open[index] = replace(state, due=due)

    def retry_overdue(self, now: float) -> None:
        """Have those lines published again whose requests must have ended, and did not."""
        for index, state in self._open.items():
            if state.due is None and state.overdue <= now:
                self._open[index] = replace(state, due=now)

    def retry_all(self, now: float) -> int:
        """Have all lines under way published again, as the same tries; return how many."""
        under_way = [state.source.index for state in self.iterate_under_way()]
        for index in under_way:
            self.delay(index, now)
        return len(under_way)

    def mark_failed(self, index: int, attempt: int, now: float, *, had_begun: bool) -> bool:
        """Note how a try failed that was not the last; True if it was the line's current one."""
        state = self._open.get(index)
        if state is None or state.attempt != attempt:
            return False
        begun = state.begun + had_begun
        pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**begun) if had_begun else 0.0
        self._open[index] = replace(state, attempt=attempt + 1, begun=begun, due=now + pause)
        return True

    def mark_ended(self, index: int) -> bool:
        """Note that a line has its result; False if that was known."""
        if self.has_ended(index):
            return False
        if state := self._open.pop(index, None):
            self.bytes -= state.source.end - state.source.offset
        self._ended.add(index)
        self._advance()
        return True

    def _advance(self) -> None:
        while self.watermark in self._ended and self.watermark in self._ends:
            self._ended.remove(self.watermark)
            self.offset = self._ends.pop(self.watermark)
            self.watermark += 1
