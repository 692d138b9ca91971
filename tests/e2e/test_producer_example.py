"""The producer of docs/producers.md, run as it stands."""

import subprocess
import sys
from pathlib import Path

from tests.support.millstream_up import MillstreamUp

EXAMPLE = Path(__file__).parents[2] / "examples/producer.py"


def test_the_example_producer_prints_a_whole_answer(mock_up: MillstreamUp) -> None:
    """It is what people copy: connect, submit, read to the end, over plain nats-py."""
    command = [sys.executable, str(EXAMPLE), mock_up.nats_url, "mock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    text, _, terminal = done.stdout.strip().rpartition("\n")
    assert len(text.split()) == 40
    assert "'finish_reason': 'length'" in terminal
