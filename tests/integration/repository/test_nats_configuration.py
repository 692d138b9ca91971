"""The shipped configurations of nats-server are valid: the server itself judges them."""

import subprocess
from pathlib import Path

import pytest
import yaml

from millstream.up.nats_server import find_binary

ROOT = Path(__file__).parents[3]
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize(
    ("config", "environment"),
    [
        ("embedded", {"NATS_PORT": "4222", "NATS_STORE_DIR": '"/tmp/a store"'}),
        ("cluster", SERVICES["nats-1"]["environment"]),
    ],
)
def test_nats_server_accepts_its_settings(config: str, environment: dict[str, str]) -> None:
    """The server itself is the judge of its files."""
    words = [find_binary(), "-t", "-c", str(ROOT / f"streams/nats/{config}.conf")]
    run = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert "is valid" in run.stderr, run.stderr
