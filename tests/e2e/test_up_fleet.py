"""`millstream up` with a table `[fleet]`: workers are started as machines that a plan wants."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.support.millstream_up import (
    KEY,
    MillstreamUp,
    command_line,
    is_gone,
    run_millstream,
    wait_until,
)

TABLE = """
[fleet.types.small]
price_per_hour = 0.6
boot_seconds = 1.5
stock = 2
[fleet.types.spot]
price_per_hour = 0.2
spot = true
notice_seconds = 2
reclaim_after_seconds = 10
"""
SECONDS = 30.0


@contextmanager
def fleet_up(home: Path, *words: str) -> Iterator[MillstreamUp]:
    home.mkdir(exist_ok=True)
    config = home / "fleet.toml"
    config.write_text(TABLE)
    own = ("--config", str(config), "--model", "mock", "--api-key", KEY)
    with MillstreamUp(home, *own, *words) as up:
        yield up.wait_until_ready()


def fleet(up: MillstreamUp, *words: str) -> list[Any]:
    """Objects that a `millstream fleet` command prints, one a line."""
    done = run_millstream("fleet", *words, "--json", "--data-dir", str(up.home / "data"))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def states(up: MillstreamUp) -> dict[str, str]:
    return {machine["id"]: machine["state"] for machine in fleet(up, "machines")}


def want(up: MillstreamUp, kind: str, count: int) -> list[str]:
    """Want so many machines; the ids of those, the oldest first."""
    (answer,) = fleet(up, "set", kind, str(count), "--model", "mock")
    assert answer["count"] == count

    def wanted() -> list[str]:
        found = [m for m in fleet(up, "machines") if m["type"] == kind]
        return [m["id"] for m in found if m["reason"] != "wanted no longer"]

    wait_until(lambda: len(wanted()) == count, SECONDS)
    return wanted()


def ask(up: MillstreamUp, **body: Any) -> HTTPResponse:
    request = urllib.request.Request(
        f"{up.url}/v1/completions",
        data=json.dumps({"model": "mock", "prompt": "the old mill", **body}).encode(),
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=60)
    return answer


def workers(up: MillstreamUp) -> int:
    """Number of workers of the model that the gateway knows."""
    request = urllib.request.Request(f"{up.url}/v1/models")
    request.add_header("Authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return sum(card["workers"] for card in json.load(answer)["data"])


def text(answer: bytes) -> str:
    return str(json.loads(answer)["choices"][0]["text"])


def streamed_text(lines: list[bytes]) -> str:
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
    chunks = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["text"] for choice in chunks)


def test_a_machine_boots_joins_serves_and_drains(tmp_path: Path) -> None:
    """Nothing runs that nobody wants."""
    with fleet_up(tmp_path) as up:
        assert (up.pids("worker"), states(up)) == ([], {})
        names = want(up, "small", 2)
        wait_until(lambda: list(states(up).values()).count("running") == 2, SECONDS)
        created = {m["id"]: m["changed_at"] - m["created_at"] for m in fleet(up, "machines")}
        assert all(created[name] >= 1.5 for name in names[:2])
        with ask(up, max_tokens=4) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        assert want(up, "small", 1) == names[:1]
        wait_until(lambda: states(up) == {names[0]: "running"}, SECONDS)
        assert "child_died" not in up.output.read_text()
        assert len(up.pids("worker")) == 1
        creds = [(up.home / f"data/broker/users/{name}.creds").exists() for name in names]
        assert creds == [True, False]
        assert up.stop() == 0


def test_a_spot_machine_is_taken_back_without_the_loss_of_a_token(tmp_path: Path) -> None:
    """Two seconds of notice are enough to hand a stream over, byte for byte."""
    with fleet_up(tmp_path, "--mock-itl-ms", "30") as up:
        (spot,) = want(up, "spot", 1)
        wait_until(lambda: workers(up), SECONDS)
        want(up, "small", 1)  # which has to boot: the stream begins on the spot machine
        with ask(up, max_tokens=400, stream=True) as stream:
            lines = [stream.readline()]
            wait_until(lambda: states(up).get(spot) in (None, "reclaimed"), SECONDS)
            lines += stream.readlines()
        with ask(up, max_tokens=400) as answer:
            assert streamed_text(lines) == text(answer.read())


def test_a_killed_supervisor_starts_nothing_twice_and_reaps_what_is_left(tmp_path: Path) -> None:
    """Its own list says what it had; a worker that outlived it would serve as another's twin."""
    with fleet_up(tmp_path) as up:
        names = want(up, "small", 2)
        wait_until(lambda: set(states(up).values()) == {"running"}, SECONDS)
        before = {m["id"]: m["created_at"] for m in fleet(up, "machines")}
    creds = tmp_path / f"data/broker/users/{names[0]}.creds"
    environment = {**os.environ, "MILLSTREAM_ID": names[0], "MILLSTREAM_NATS_CREDS": str(creds)}
    with subprocess.Popen(["sleep", "600"], env=environment) as leftover:
        with fleet_up(tmp_path) as up:
            assert leftover.wait(SECONDS) == -9
            wait_until(lambda: len(up.pids("worker")) == 2, SECONDS)
            assert {m["id"]: m["created_at"] for m in fleet(up, "machines")} == before
            with ask(up, max_tokens=4) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4


def test_a_machine_whose_worker_dies_gets_another(tmp_path: Path) -> None:
    """The machine is the same; that it has crashed is seen."""
    with fleet_up(tmp_path) as up:
        want(up, "small", 1)
        wait_until(lambda: up.pids("worker"), SECONDS)
        (pid,) = up.pids("worker")
        os.kill(pid, 9)
        wait_until(lambda: is_gone(pid) and up.pids("worker"), SECONDS)
        wait_until(lambda: [m["crashes"] for m in fleet(up, "machines")] == [1], SECONDS)
        assert "millstream worker" in command_line(up.pids("worker")[0])


def test_more_machines_than_the_model_may_have_are_refused(tmp_path: Path) -> None:
    """The table bounds what is paid, whoever orders."""
    with fleet_up(tmp_path) as up:
        words = ("small", "5", "--model", "mock", "--data-dir", str(up.home / "data"))
        done = run_millstream("fleet", "set", *words)
        assert done.returncode == 1
        assert "'mock' may have 4 workers, not 5: raise max_workers" in done.stderr


def test_workers_and_a_fleet_exclude_each_other(tmp_path: Path) -> None:
    """A given number would be without effect."""
    config = tmp_path / "fleet.toml"
    config.write_text(TABLE)
    done = run_millstream("up", "--config", str(config), "--workers", "2")
    assert done.returncode == 2
    assert "--workers is given beside a table [fleet]" in done.stderr


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("memry = 1", "fleet.types.small.memry: unknown key; did you mean memory?"),
        ("boot_seconds = -1", "fleet.types.small.boot_seconds: "),
        ("notice_seconds = 5", "notice_seconds is for types with `spot = true`"),
        ("", "fleet.types.small.price_per_hour: "),
    ],
)
def test_a_table_that_does_not_parse_stops_the_start(tmp_path: Path, line: str, told: str) -> None:
    """With its line, so that nothing is bought by mistake."""
    config = tmp_path / "fleet.toml"
    price = "price_per_hour = 1" if line else ""
    config.write_text(f"[fleet.types.small]\n{price}\n{line}\n")
    done = run_millstream("up", "--config", str(config), "--model", "mock")
    assert done.returncode == 2
    assert told in done.stderr


def test_without_a_table_there_is_no_fleet(mock_up: MillstreamUp) -> None:
    """And a sentence that says how to have one."""
    done = run_millstream("fleet", "types", "--data-dir", str(mock_up.home / "data"))
    assert done.returncode == 1
    assert "there is no fleet" in done.stderr
