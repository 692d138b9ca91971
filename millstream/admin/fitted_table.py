"""A table that fits the terminal: long names are shortened, texts wrapped, columns left out. Pure.

Its width is that of the console it is printed to, at each print.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_GAP = 2  # between two columns


@dataclass(frozen=True)
class Column:
    """A column: its title, in lines, and what may be done to its cells where there is little room.

    A `name` may be shortened in the middle and a `text` wrapped, down to `least` characters; a
    `fixed` cell stays as it is. Columns with a `rank` are left out of a table that is still too
    wide, the one with the highest rank first. `is_number` aligns cells to the right.
    """

    title: str
    kind: Literal["fixed", "name", "text"] = "fixed"
    least: int = 8
    rank: int = 0
    is_number: bool = False

    @property
    def name(self) -> str:
        """The title in one line."""
        return self.title.replace("\n", " ")


class FittedTable:
    """A renderable of rich: a table with a title line, and a last line on columns left out."""

    def __init__(
        self, columns: Sequence[Column], rows: Iterable[Sequence[str]], title: str | None = None
    ) -> None:
        self._columns, self._rows, self._title = columns, [*rows], title
        self._bounds = [
            _measure_column(column, [row[i] for row in self._rows])
            for i, column in enumerate(columns)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table for the width of `options`; rich calls this."""
        shown = self._choose_columns(options.max_width)
        widths = self._divide(shown, options.max_width)
        table = Table(
            title=self._title,
            title_justify="left",
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for i in shown:
            column = self._columns[i]
            table.add_column(
                Text(column.title),
                justify="right" if column.is_number else "left",
                width=widths[i],
                no_wrap=column.kind != "text",
                overflow="fold",
            )
        ellipsis = "~" if options.ascii_only else "…"
        for row in self._rows:
            table.add_row(*(self._make_cell(i, row[i], widths[i], ellipsis) for i in shown))
        yield table
        if left_out := [c.name for i, c in enumerate(self._columns) if i not in shown]:
            yield Text(f"Left out in this width: {', '.join(left_out)}; see --json.")

    def _make_cell(self, i: int, value: str, width: int, ellipsis: str) -> Text:
        is_name = self._columns[i].kind == "name"
        return Text(shorten_middle(value, width, ellipsis) if is_name else value)

    def _choose_columns(self, width: int) -> list[int]:
        """Return the positions of the columns to show, leaving out by rank until all fit."""
        shown = [*range(len(self._columns))]
        while sum(self._bounds[i].minimum + _GAP for i in shown) - _GAP > width:
            ranked = [i for i in shown if self._columns[i].rank]
            if not ranked:
                break  # rich will squeeze what is left
            shown.remove(max(ranked, key=lambda i: self._columns[i].rank))
        return shown

    def _divide(self, shown: Sequence[int], width: int) -> dict[int, int]:
        """Return the width of each column shown; spare room goes to the narrowest that need it."""
        widths = {i: self._bounds[i].minimum for i in shown}
        spare = width - sum(widths.values()) - _GAP * (len(shown) - 1)
        while spare > 0 and (cut := [i for i in shown if widths[i] < self._bounds[i].maximum]):
            widths[min(cut, key=widths.__getitem__)] += 1
            spare -= 1
        return widths


def shorten_middle(text: str, width: int, ellipsis: str = "…") -> str:
    """Return `text` with its middle replaced by `ellipsis` so that it takes `width` cells at most.

    A text that fits is returned as it is. Beginning and end stay: names often differ there.
    """
    keep = width - cell_len(ellipsis)
    if cell_len(text) <= width or keep < 1:
        return text
    while True:
        short = text[: keep - keep // 2] + ellipsis + text[len(text) - keep // 2 :]
        if cell_len(short) <= width or keep == 1:
            return short
        keep -= 1  # a character may take two cells


def _measure_column(column: Column, cells: Sequence[str]) -> Measurement:
    """Return the least width that a column may get, and the one that its longest line takes."""
    title = _longest_line(column.title)
    natural = max(map(_longest_line, (column.title, *cells)))
    if column.kind == "fixed":
        return Measurement(natural, natural)
    least = column.least
    if column.kind == "text":  # no wider than its longest word
        words = (word for cell in cells for word in cell.split())
        least = min(least, max(map(cell_len, words), default=0))
    return Measurement(min(natural, max(title, least)), natural)


def _longest_line(text: str) -> int:
    return max(map(cell_len, text.split("\n")))
