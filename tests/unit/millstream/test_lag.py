"""Output of `millstream lag` for the dispatchers' reports."""

from typing import Any

from rich.console import Console

from millstream.admin.lag import render_report


def rendered(**report: Any) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(render_report({"lanes": [], "workers": [], "unanswered": [], **report}))
    return capture.get()


def test_lanes_that_a_report_leaves_out_are_counted() -> None:
    """A table that ends early must not look whole."""
    assert "1,234 more lanes, with fewer tokens, are not shown." in rendered(lanes_left_out=1234)
    assert "more lanes" not in rendered(lanes_left_out=0)
