"""Runs five unmodified clients against `millstream up --model mock`, each in its own process.

    python -m tests.clients [NAME ...]

Clients that are not installed are said to be missing, and the exit status is 2. To get them, in a
folder of your own whose path is given in CLIENTS:

    python -m venv $CLIENTS/venv
    $CLIENTS/venv/bin/pip install openai langchain-openai instructor
    npm install --prefix $CLIENTS openai
    apt-get install openjdk-17-jdk-headless nodejs npm
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.millstream_up import KEY, MillstreamUp

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("CLIENTS", "."))
SECONDS = 120
MISSING = 2
_WEBHOOKS = ("--webhook-network", "127.0.0.0/8")  # a client receives some


def _commands() -> dict[str, list[str]]:
    python = str(CLIENTS / "venv/bin/python")
    return {
        "openai-python": [python, str(HERE / "openai_client.py")],
        "langchain": [python, str(HERE / "langchain_client.py")],
        "instructor": [python, str(HERE / "instructor_client.py")],
        "openai-js": ["node", str(HERE / "openai_client.mjs")],
        "jdk": ["java", str(HERE / "JdkClient.java")],
    }


def run_client(name: str, url: str, model: str) -> int:
    """Run one client; returns its exit status, `MISSING` if it is not installed."""
    words = [*_commands()[name], url, KEY, model]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["OPENAI_JS"] = str((CLIENTS / "node_modules/openai").resolve())
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except FileNotFoundError:
        print(f"{name}: not installed")
        return MISSING
    said = (done.stdout + done.stderr).strip()
    print(f"{name}: {'right' if done.returncode == 0 else 'WRONG'}: {said[-2000:]}")
    return done.returncode and 1


def main(names: Sequence[str]) -> int:
    """Run the clients; returns 0 if all are right, 1 if one is wrong, else 2 if one is missing."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no cell is left behind
    model = os.environ.get("MODEL", "mock")
    with (
        tempfile.TemporaryDirectory() as home,
        MillstreamUp(Path(home), "--model", model, "--api-key", KEY, *_WEBHOOKS) as up,
    ):
        up.wait_until_ready()
        statuses = {run_client(name, up.url, model) for name in names or _commands()}
    return 1 if 1 in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
