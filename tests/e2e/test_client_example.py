"""The example of docs/clients.md, run as it stands."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.millstream_up import KEY, MillstreamUp

ROOT = Path(__file__).parents[2]


def test_the_example_client_prints_a_whole_answer(mock_up: MillstreamUp) -> None:
    """It is what people copy: several requests at once over one socket."""
    command = [sys.executable, str(ROOT / "examples/client.py"), mock_up.url, "mock", KEY]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "client")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True, env=environment
    )
    text, end, others = done.stdout.strip().rsplit("\n", 2)
    assert len(text.split()) == 40
    assert "finish_reason='length'" in end
    assert others.count(",") == 2
