"""`python -m bench.autobahn` runs Autobahn's fuzzing client against the gateway's WebSocket server.

The suite expects an echo, so the gateway's server runs an application that echoes.
MILLSTREAM_BENCH_AUTOBAHN names a Python 2.7 and, after a space, the directory into which its pip
has installed `autobahntestsuite==0.8.2` with --target.
"""

import asyncio
import json
import os
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from starlette.types import Receive, Scope, Send

from bench import machine_info
from bench.reporting import DIRECTORY
from gateway.server.uvicorn_server import GatewayServer, build_config, listen
from gateway.settings import GatewaySettings
from tests.support.ports import free_port

SUITE = "MILLSTREAM_BENCH_AUTOBAHN"
RUN = """
import os, site, sys
site.addsitedir(os.environ["SITE"])
sys.path.insert(0, os.environ["SITE"])
from autobahntestsuite.wstest import run
run()
"""
LARGEST_FRAME = 16 * 2**20  # that the suite sends
OPTIONAL = ["12.*", "13.*"]  # compression, which we do not offer


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Run a WebSocket as an ASGI application that sends back each message."""
    await receive()
    await send({"type": "websocket.accept"})
    while (event := await receive())["type"] == "websocket.receive":
        await send({**event, "type": "websocket.send"})


async def _report(port: int, home: Path) -> dict[str, dict[str, str]]:
    """Run the suite; return its report on each case by the case's number."""
    spec = {
        "outdir": str(home / "report"),
        "servers": [{"agent": "millstream", "url": f"ws://127.0.0.1:{port}"}],
        "cases": ["*"],
        "exclude-cases": OPTIONAL,
        "exclude-agent-cases": {},
    }
    (home / "spec.json").write_text(json.dumps(spec))
    python, _, site = os.environ[SUITE].partition(" ")
    command = [python, "-c", RUN, "-m", "fuzzingclient", "-s", str(home / "spec.json")]
    environment = {"PATH": os.environ["PATH"], "SITE": site}
    suite = await asyncio.create_subprocess_exec(*command, cwd=home, env=environment)
    assert await suite.wait() == 0, "the suite failed"
    found = json.loads((home / "report" / "index.json").read_text())
    cases: dict[str, dict[str, str]] = found["millstream"]
    return cases


async def _run() -> dict[str, dict[str, str]]:
    settings = GatewaySettings(port=free_port(), max_body_bytes=LARGEST_FRAME)
    listener = listen(settings)
    server = GatewayServer(build_config(echo, settings))
    serving = asyncio.create_task(server.serve([listener]))
    with tempfile.TemporaryDirectory() as home:
        try:
            return await _report(settings.port, Path(home))
        finally:
            server.should_exit = True
            await serving


def main() -> None:
    """Run the suite and write its report to `results/`; exit with an error if a case failed."""
    if SUITE not in os.environ:
        raise SystemExit(f"autobahn: {SUITE} must name a Python 2.7 with autobahntestsuite")
    cases = asyncio.run(_run())
    behaviours = Counter(case["behavior"] for case in cases.values())
    closing = Counter(case["behaviorClose"] for case in cases.values())
    others = {
        number: case
        for number, case in cases.items()
        if {case["behavior"], case["behaviorClose"]} - {"OK", "INFORMATIONAL", "NON-STRICT"}
    }
    content = {
        "name": "autobahn",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_info.describe_machine(),
        "setting": {"suite": "autobahntestsuite 0.8.2", "left_out": OPTIONAL},
        "cases": len(cases),
        "behaviours": behaviours,
        "closing": closing,
        "neither_ok_nor_informational": others,
        "non_strict": [n for n, case in cases.items() if case["behavior"] == "NON-STRICT"],
    }
    path = DIRECTORY / f"autobahn-{datetime.now(UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"{len(cases)} cases: {dict(behaviours)}, closing: {dict(closing)}; written to {path}")
    if others:
        raise SystemExit(f"failed: {', '.join(others)}")


if __name__ == "__main__":
    main()
