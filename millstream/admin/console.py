"""Constants that operator commands share: output widths, an exit status, the time for answers."""

import sys

NOT_FOUND = 1  # exit status: what was asked for is not there, or nobody answers for it
ANSWER_SECONDS = 2.0  # how long a dispatcher or worker may take to answer

# Columns of output to a file or pipe, which has no width of its own.
TABLE_COLUMNS = 140
MODEL_COLUMNS = 200
DEAD_LETTER_COLUMNS = 240  # ids and errors are long


def console_width(piped_columns: int) -> int | None:
    """Return the `width` in columns to give a rich `Console` that prints to stdout.

    Returns None if stdout is a terminal, so that rich uses the terminal's own width. Returns
    `piped_columns` if stdout is a file or pipe, which has no width.
    """
    return None if sys.stdout.isatty() else piped_columns
