"""The GPU benchmark is one command, and works before there is a GPU to run it on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench/gpu.sh"


@pytest.mark.timeout(600)
def test_a_tiny_run_measures_everything_and_says_where(tmp_path: Path) -> None:
    """Every path of the script but the device's own; its figures must not pass for a GPU's."""
    command = [str(SCRIPT), "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (file,) = tmp_path.glob("tiny-*.json")
    written = json.loads(file.read_text())
    assert written["medians"]["same_text"] == 1
    assert written["medians"]["b3_c64_roofline"] > 0
    assert set(written["setting"]["failed"]) <= {"continuous_tokens_s"}  # another project's
    assert "GPU" in written["setting"]["device"] or written["name"].endswith("cuda")
