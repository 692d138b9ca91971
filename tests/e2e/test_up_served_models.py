"""`millstream models serve` on the workers of a running `millstream up`."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.millstream_up import KEY, MillstreamUp, run_millstream, wait_until

SECONDS = 60.0  # a worker's user gets its rights within some 15 s


def run(up: MillstreamUp, *words: str) -> list[Any]:
    """JSON that a `millstream models` command prints, an object a line."""
    done = run_millstream("models", *words, "--json", "--data-dir", str(up.home / "data"))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def states(up: MillstreamUp) -> dict[str, str]:
    """States of the models of the one worker that serves by record, as `models served` tells."""
    (record,) = run(up, "served")
    return dict(record["workers"][0]["models"]) if record["workers"] else {}


def add_second(up: MillstreamUp) -> None:
    """Register a second model, over the admin API."""
    state = json.loads((up.home / "data" / "state.json").read_text())
    version = {"id": "1", "options": {"ttft_ms": 1, "itl_ms": 1}}
    model = {
        "name": "second",
        "engine": "mock",
        "context_length": 512,
        "vocab_size": 256,
        "default_max_tokens": 16,
        "versions": {"1": version},
        "default_version": "1",
    }
    request = urllib.request.Request(
        f"{state['admin']}/admin/v1/models/second",
        data=json.dumps({"model": model}).encode(),
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        method="PUT",
    )
    urllib.request.urlopen(request, timeout=30).close()


def test_a_model_is_served_by_a_running_worker_that_has_no_rights_for_it_yet(
    tmp_path: Path,
) -> None:
    """Its user gets them from the supervisor; nothing is restarted."""
    with MillstreamUp(tmp_path, "--model", "mock", "--api-key", KEY) as up:
        up.wait_until_ready()
        before = up.pids("worker")
        add_second(up)
        assert run(up, "serve", "second", "--on", "worker-1") == [
            {"on": "worker-1", "models": ["second"]}
        ]
        wait_until(lambda: states(up) == {"mock@1": "loaded", "second@1": "loaded"}, SECONDS)
        request = urllib.request.Request(
            f"{up.url}/v1/completions",
            data=json.dumps({"model": "second", "prompt": "the old mill"}).encode(),
            headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 16
        assert run(up, "unserve", "second", "--on", "worker-1") == [
            {"on": "worker-1", "models": []}
        ]
        assert run(up, "served") == []
        assert up.pids("worker") == before
        assert up.stop() == 0
