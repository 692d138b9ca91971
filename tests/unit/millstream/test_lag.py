"""Output of `millstream lag` for the dispatchers' reports."""

from typing import Any

import pytest
from rich.console import Console

from millstream.admin.lag import render_report

TENANT = "customer-" + "x" * 50 + "-17"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def rendered(width: int = 140, **report: Any) -> str:
    console = Console(width=width)
    empty = {"lanes": [], "lanes_left_out": 0, "workers": [], "unanswered": []}
    with console.capture() as capture:
        console.print(render_report({**empty, **report}))
    return capture.get()


def lane(tenant: str, model: str) -> dict[str, Any]:
    """A lane with the largest numbers that are to be expected."""
    return {
        "tenant": tenant,
        "model": model,
        "priority": "interactive",
        "submissions": 0,
        "queued": 1000,
        "tokens": 12_345_678,
        "oldest_age_seconds": 3600.0,
        "in_flight": 1000,
        "estimated_wait_seconds": None,
    }


def worker(name: str, model: str) -> dict[str, Any]:
    return {
        "worker": name,
        "model": model,
        "version": "0123456789ab",
        "running": 1000,
        "max_sequences": 1024,
        "waiting": 10,
        "free_sequences": 24,
        "free_tokens": 1_000_000,
        "kv_tokens": 1_000_000,
        "tokens_per_second": 12_345.0,
        "draining": False,
        "resident": False,
    }


def test_lanes_that_a_report_leaves_out_are_counted() -> None:
    """A table that ends early must not look whole."""
    assert "1,234 more lanes, with fewer tokens, are not shown." in rendered(lanes_left_out=1234)
    assert "more lanes" not in rendered(lanes_left_out=0)


def test_a_terminal_of_80_columns_shows_a_line_for_each_lane() -> None:
    """With every column, and names by which they can be told apart."""
    lanes = [lane(TENANT, MODEL), lane("acme", "mock")]
    text = rendered(80, lanes=lanes, lanes_left_out=5)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    (long,) = (line for line in lines if "…" in line)
    for part in ("cust…-17", "uct", "interactive", "1,000", "12,345,678", "3600.0 s", "unknown"):
        assert part in long
    assert "5 more lanes" in text
    assert "Left out" not in text.partition("Workers")[0]


@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_of_80_columns_shows_every_worker(width: int) -> None:
    """Columns that follow from the rest are left out, and named."""
    workers = [worker(f"gpu-worker-7f9c-{'y' * 40}", MODEL), worker("w", "mock")]
    lines = rendered(width, workers=workers, unanswered=[MODEL] * 5).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert text.count("1000 of 1024") == text.count("not loaded") == 2
    assert "Left out in this width: waiting, free sequences; see --json." in text or width > 80
    assert "No dispatcher answers for:" in text


def test_a_model_is_shown_as_it_is_called() -> None:
    """Brackets in a name are no markup."""
    assert "[b]x" in rendered(lanes=[lane("acme", "[b]x")])
