"""`python -m bench.simulate` as a whole: ten seconds of simulation."""

import json
from pathlib import Path

import pytest

from bench import simulate


def test_the_program_runs_a_scenario_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow worker takes few steps, so this is quick."""
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    slow = ["--step-ms", "500", "--kv-tokens", "4000"]
    output = ["--json", str(found), "--plot", str(picture)]
    simulate.main(["b1-weights", "--seeds", "1", *slow, *output])
    scenario = json.loads(found.read_text())["scenarios"]["b1-weights"]
    assert scenario["worst"]["millstream"]["error"] < scenario["worst"]["fcfs"]["error"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "b1-weights" in capsys.readouterr().out
