"""The shipped configurations of nats-server are valid: the server itself judges them."""

import subprocess
from pathlib import Path

import pytest

from millstream.up.nats_server import find_binary

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("config", "environment"),
    [
        ("embedded", {"NATS_PORT": "4222", "NATS_STORE_DIR": '"/tmp/a store"'}),
        ("cluster", {"NATS_NAME": "nats-1", "NATS_ROUTES": '["nats://nats-2:6222"]'}),
    ],
)
def test_nats_server_accepts_its_settings(config: str, environment: dict[str, str]) -> None:
    """The server itself is the judge of its files."""
    words = [find_binary(), "-t", "-c", str(ROOT / f"streams/nats/{config}.conf")]
    run = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert "is valid" in run.stderr, run.stderr
