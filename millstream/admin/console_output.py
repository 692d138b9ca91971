"""Output and constants that operator commands share: width, exit status, time for answers."""

import json
import sys
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Column, Table

NOT_FOUND = 1  # exit status: what was asked for is not there, or nobody answers for it
ANSWER_SECONDS = 2.0  # how long a dispatcher or worker may take to answer
PIPED_COLUMNS = 240  # of output to a file or pipe, which has no width: ids and errors are long


def console_width() -> int | None:
    """Return the `width` in columns to give a rich `Console` that prints to stdout.

    Returns None if stdout is a terminal, so that rich uses the terminal's own width, and
    `PIPED_COLUMNS` if stdout is a file or pipe.
    """
    return None if sys.stdout.isatty() else PIPED_COLUMNS


def make_console(kind: type[Console] = Console) -> Console:
    """Return a console that prints to stdout as it is now; names and errors are no markup."""
    return kind(width=console_width(), markup=False, highlight=False)


def make_whole_table(*titles: str, title: str | None = None) -> Table:
    """Return a table in which long words are wrapped, not cut: digests are compared and copied.

    Without `titles` it has two columns, of names and values, and no header.
    """
    columns = [Column(each, overflow="fold") for each in titles or ("", "")]
    return Table(*columns, title=title, title_justify="left", show_header=bool(titles))


def print_json_lines(objects: Iterable[Mapping[str, object]]) -> None:
    """Print JSON for programs: one object in each line."""
    for each in objects:
        print(json.dumps(each))


def print_sentences(text: str) -> None:
    """Print lines of sentences, wrapped at words if stdout is a terminal."""
    if console_width() is None:
        make_console().print(text)
    else:
        print(text)
