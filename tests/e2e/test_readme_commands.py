"""The README's first commands do what it says, as they stand there."""

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path

from millstream.up.demo_conversion_process import cache_directory
from tests.support.eventually import eventually
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
START_SECONDS = 300  # converts the demo model if this machine has not yet


def commands() -> tuple[str, str]:
    """The two console blocks under Start, joined over their line ends."""
    start = (ROOT / "README.md").read_text().split("## Start")[1].split("\n## ")[0]
    serve, ask = re.findall(r"```console\n\$ (.*?)```", start, re.DOTALL)
    return serve.strip(), ask.strip()


def test_the_two_commands_stream_tokens_of_a_real_model(tmp_path: Path) -> None:
    """A stranger types them on a fresh machine; only the ports and the home are this test's own."""
    serve, ask = commands()
    port = str(free_port())
    environment = os.environ | {
        "HOME": str(tmp_path),
        "MILLSTREAM_PORT": port,
        "MILLSTREAM_NATS_PORT": "0",
        "MILLSTREAM_CACHE_DIR": str(cache_directory()),
    }
    printed = tmp_path / "serve.txt"
    with printed.open("w") as output:
        started = subprocess.Popen(
            serve, shell=True, cwd=ROOT, env=environment, stdout=output, start_new_session=True
        )
    try:
        ready = eventually(lambda: "is ready" in printed.read_text(), seconds=START_SECONDS)
        asyncio.run(ready)
        answer = subprocess.run(
            ask.replace(":8080", f":{port}"),
            shell=True,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    finally:
        os.killpg(started.pid, signal.SIGINT)
        started.wait(30)
    events = [line for line in answer.splitlines() if line.startswith("data: ")]
    assert len(events) > 10, answer
    assert events[-1] == "data: [DONE]"
