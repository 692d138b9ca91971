"""`millstream up` with a table `[fleet]`: the fleet service tells its signals."""

import json
from pathlib import Path
from typing import Any

from tests.e2e.test_up_fleet import fleet_up, want
from tests.support.millstream_up import MillstreamUp, run_millstream, wait_until

PATIENCE_SECONDS = 60.0


def read_signals(up: MillstreamUp) -> dict[str, Any]:
    """Output of the command; nothing while nobody answers it."""
    found = run_millstream("fleet", "signals", "--json", "--data-dir", str(up.home / "data"))
    return json.loads(found.stdout) if found.returncode == 0 else {}


def types_of(report: dict[str, Any]) -> list[str]:
    models = report.get("models", [])
    return [pool["type"] for model in models for pool in model["pools"]]


def test_a_fleet_service_is_started_and_stopped_beside_the_others(tmp_path: Path) -> None:
    """It knows the workers by their type, and the gateway."""
    with fleet_up(tmp_path) as up:
        want(up, "small", 1)
        wait_until(lambda: types_of(read_signals(up)) == ["small"], PATIENCE_SECONDS)
        assert len(read_signals(up)["gateways"]) == 1
        assert up.stop() == 0


def test_without_a_table_the_command_says_what_is_missing(mock_up: MillstreamUp) -> None:
    """Nobody asked for a fleet, so none runs."""
    data = str(mock_up.home / "data")
    found = run_millstream("fleet", "signals", "--data-dir", data)
    assert found.returncode == 1
    assert "with a table [fleet]" in found.stderr
    assert mock_up.pids("millstream fleet") == []
