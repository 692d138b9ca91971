"""Tables of operator commands fit the terminal."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from millstream.admin.fitted_table import Column, FittedTable, shorten_middle

COLUMNS = (
    Column("tenant", "name"),
    Column("error", "text", least=10),
    Column("queued\nnow", is_number=True, rank=1),
    Column("seen", rank=2),
    Column("state"),
)
ROWS = [("acme", "one two three", "1,000", "2026-11-25", "serving"), ("b", "", "5", "", "gone")]


def printed(width: int, rows: Sequence[tuple[str, ...]] | None = None) -> list[str]:
    console = Console(width=width, markup=False)
    with console.capture() as capture:
        console.print(FittedTable(COLUMNS, ROWS if rows is None else rows, "Lanes"))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_table_with_room_is_whole() -> None:
    """As wide as its cells, however wide the terminal is."""
    title, over, heads, rule, first, second = printed(200)
    assert (title, over.strip()) == ("Lanes", "queued")
    assert heads == "tenant  error             now  seen        state"
    assert set(rule) == {"─"}
    assert first == "acme    one two three   1,000  2026-11-25  serving"
    assert second.split() == ["b", "5", "gone"]


def test_texts_are_wrapped_before_a_column_is_left_out() -> None:
    """At words; the column with the highest rank goes first, and is named."""
    whole = len("acme    one two three   1,000  2026-11-25  serving")
    lines = printed(whole - 3)
    assert lines[4].split() == ["acme", "one", "two", "1,000", "2026-11-25", "serving"]
    assert lines[5].split() == ["three"]
    assert printed(whole - 8)[4].split() == ["acme", "one", "1,000", "2026-11-25", "serving"]
    assert printed(whole - 9)[-1] == "Left out in this width: seen; see --json."
    assert " ".join(printed(25)[-3:]).endswith(
        "Left out in this width: queued now, seen; see --json."
    )


def test_long_names_are_shortened_in_their_middles() -> None:
    """A name that ends in a number still does."""
    rows = [("customer-production-emea-17", "", "1", "2026-11-25", "serving")]
    (line,) = (line for line in printed(45, rows) if "serving" in line)
    assert line.startswith("cust…a-17  ")
    assert "Left" not in printed(45, rows)[-1]


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abc…fg"),
        ("abcdefg", 2, "a…"),
        ("日本語日本語", 7, "日本…語"),
        ("日本語日本語", 6, "日…語"),
        ("", 3, ""),
    ],
)
def test_the_middle_goes(text: str, width: int, short: str) -> None:
    """Cells count, of which some characters take two."""
    assert shorten_middle(text, width) == short


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(categories=["L", "N", "P"]), max_size=63),
            st.text(max_size=200),
            *[st.integers(0, 10**6).map(str)] * 3,
        ),
        max_size=5,
    ),
    st.integers(40, 120),
)
def test_no_line_is_wider_than_the_terminal(rows: list[tuple[str, ...]], width: int) -> None:
    """Whatever is in it."""
    assert all(cell_len(line) <= width for line in printed(width, rows))
