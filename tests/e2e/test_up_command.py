"""`millstream up`: ready in seconds, kept alive, gone at once, and nothing left behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from websockets.sync.client import connect

from tests.engine import tiny_models
from tests.support.millstream_up import (
    KEY,
    MillstreamUp,
    command_line,
    descendants,
    is_gone,
    millstream_process,
    run_in_terminal,
    run_millstream,
    wait_until,
)
from tests.support.ports import free_port

MOCK = ("--model", "mock", "--mock-ttft-ms", "5", "--mock-itl-ms", "2", "--api-key", KEY)


def ask(up: MillstreamUp, key: str = KEY, port: int | None = None, **body: Any) -> Any:
    """An open answer to a completion request; raises HTTPError for a refusal."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port or up.port}/v1/completions",
        data=json.dumps({"model": "mock", "prompt": "hello", "max_tokens": 4, **body}).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=30)


def tokens(up: MillstreamUp, key: str = KEY, **options: Any) -> int:
    """How many tokens a completion had."""
    with ask(up, key, **options) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def answers(up: MillstreamUp, port: int | None = None) -> bool:
    """Whether its gateway, or another one of it at `port`, serves the key that it was given."""
    try:
        return tokens(up, port=port) == 4
    except OSError:
        return False


@pytest.fixture
def up(tmp_path: Path) -> Iterator[MillstreamUp]:
    """One of the test's own, to kill and stop."""
    with MillstreamUp(tmp_path, *MOCK, "--workers", "2") as running:
        yield running.wait_until_ready()


def test_each_service_is_a_process_that_its_command_line_names(up: MillstreamUp) -> None:
    """Operators and their scripts look for that word; no other process may have it."""
    words = (
        "nats-server",
        "millstream admin",
        "dispatcher",
        "gateway",
        "millstream jobs",
        "worker",
    )
    assert [len(up.pids(word)) for word in words] == [1, 1, 1, 1, 1, 2]
    assert len(descendants(up.process.pid)) == 7
    assert not any(KEY in command_line(pid) for pid in descendants(up.process.pid))


def test_sigterm_ends_everything(up: MillstreamUp) -> None:
    """Status 0, no process left, and no trace that would send commands to a dead server."""
    children = descendants(up.process.pid)
    assert up.stop() == 0
    assert all(is_gone(child) for child in children)
    assert not (up.home / "data/state.json").exists()


def test_sigterm_in_the_middle_of_a_stream_ends_everything_too(up: MillstreamUp) -> None:
    """A client that reads for an hour must not keep it."""
    with ask(up, max_tokens=8000, stream=True) as stream:
        assert stream.readline().startswith(b"id: ")
        assert up.stop() == 0


def test_a_stream_that_outlasts_the_end_of_everything_ends_in_an_error(up: MillstreamUp) -> None:
    """Its client would take what it has for the whole answer."""
    with ask(up, max_tokens=8000, stream=True) as stream:
        assert stream.readline().startswith(b"id: ")
        up.process.terminate()
        assert b'"code":"overloaded"' in stream.read()
        assert up.process.wait(10) == 0


def test_ctrl_c_is_for_the_supervisor_alone(up: MillstreamUp) -> None:
    """A terminal sends SIGINT to a whole process group; the drain must still be in order."""
    groups = {os.getpgid(pid) for pid in descendants(up.process.pid)}
    assert os.getpgid(up.process.pid) not in groups


def test_a_second_signal_kills_it_with_its_children(up: MillstreamUp) -> None:
    """Whoever asks twice does not want to wait."""
    (gateway,) = up.pids("gateway")
    os.kill(gateway, signal.SIGSTOP)  # deaf: the first signal cannot end it
    children = descendants(up.process.pid)
    up.process.terminate()
    wait_until(lambda: "draining" in up.output.read_text(), 5)
    up.process.terminate()
    assert up.process.wait(5) == -signal.SIGTERM
    wait_until(lambda: all(is_gone(child) for child in children), 5)


def test_killing_it_kills_its_children(up: MillstreamUp) -> None:
    """No orphan keeps a port, or a GPU."""
    children = descendants(up.process.pid)
    up.process.kill()
    wait_until(lambda: all(is_gone(child) for child in children), 5)


@pytest.mark.parametrize(
    "word", ["millstream admin", "gateway", "dispatcher", "worker", "nats-server"]
)
def test_a_killed_service_is_started_again_and_serves(up: MillstreamUp, word: str) -> None:
    """One crash of any kind is not the end."""
    before = up.pids(word)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: set(up.pids(word)) - set(before), 10)
    wait_until(lambda: answers(up), 30)


def test_only_a_kill_is_told_as_a_death(tmp_path: Path) -> None:
    """One worker is drained by an operator, one gets a SIGTERM, and one is killed."""
    with MillstreamUp(tmp_path, *MOCK, "--workers", "3") as up:
        before = up.wait_until_ready().pids("worker")
        wait_until(lambda: _workers(up) == 3, 20)
        words = ("drain", "worker-1", "--within", "5s", "--data-dir", str(tmp_path / "data"))
        drained = run_millstream(*words)
        assert "worker-1 is empty" in drained.stdout
        wait_until(lambda: _count(up, "child_ended") == 1, 10)
        terminated, killed = (pid for pid in before if not is_gone(pid))
        os.kill(terminated, signal.SIGTERM)
        os.kill(killed, signal.SIGKILL)
        expected = {"worker_drained": 2, "child_ended": 2, "worker_dead": 1, "child_died": 1}
        wait_until(lambda: all(_count(up, event) >= n for event, n in expected.items()), 10)
        assert {event: _count(up, event) for event in expected} == expected
        assert _count(up, "worker_silent") == 0


def _workers(up: MillstreamUp) -> int:
    """The number of workers of the mock that its gateway has heard of from the dispatcher."""
    with urllib.request.urlopen(f"{up.url}/readyz", timeout=5) as answer:
        return int(json.load(answer)["workers"]["mock"])


def _count(up: MillstreamUp, event: str) -> int:
    """The number of times that an event is in the logs of all processes."""
    logs = [up.output, *(up.home / "data/logs").glob("*.log")]
    return sum(log.read_text().count(f'"event":"{event}"') for log in logs)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_broker_whose_disk_was_full_is_started_again_once_there_is_room(tmp_path: Path) -> None:
    """It gives up what it could not write, and a restart before would be in vain."""
    with small_disk(tmp_path / "data") as disk, MillstreamUp(tmp_path, *MOCK) as up:
        before = up.wait_until_ready().pids("nats-server")
        fill(disk / "ballast")
        wait_until(lambda: not answers(up) and "broker_unhealthy" in up.output.read_text(), 60)
        assert up.pids("nats-server") == before
        (disk / "ballast").unlink()
        wait_until(lambda: set(up.pids("nats-server")) - set(before), 20)
        wait_until(lambda: answers(up), 30)
        assert up.output.read_text().count("broker_restarting") == 1


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A disk of 64 MiB there, until the block is left."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "millstream", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def fill(file: Path) -> None:
    """To the last byte of its disk."""
    with file.open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(2**16))
    assert shutil.disk_usage(file.parent).free == 0


def test_what_a_killed_worker_was_at_goes_on_at_once(tmp_path: Path) -> None:
    """The supervisor gives it back: nobody could wait for this ack wait."""
    file = tmp_path / "patient.toml"
    file.write_text("ack_wait_seconds = 600")
    with MillstreamUp(tmp_path, *MOCK, "--config", str(file)) as up:
        up.wait_until_ready()
        with ask(up, max_tokens=1000, stream=True) as stream:
            assert stream.readline().startswith(b"id: ")
            (worker,) = up.pids("worker")
            os.kill(worker, signal.SIGKILL)
            assert stream.read().rstrip().endswith(b"data: [DONE]")


def test_streams_of_a_killed_worker_go_on_on_the_same_socket(up: MillstreamUp) -> None:
    """Without a gap, and with the text of undisturbed ones."""
    _outlive_a_worker(up, "mock")


def test_greedy_streams_of_a_killed_engine_go_on_on_the_same_socket(tmp_path: Path) -> None:
    """The other worker's engine continues behind the stored tokens as if nothing had been."""
    settings = LlamaConfig(**tiny_models.GROUPED | {"max_position_embeddings": 2048})
    torch.manual_seed(7)
    LlamaForCausalLM(settings).save_pretrained(tmp_path / "llama")
    tiny_models.tokenizer().save(str(tmp_path / "llama/tokenizer.json"))
    words = ("--model", str(tmp_path / "llama"), "--workers", "2", "--api-key", KEY)
    with MillstreamUp(tmp_path, *words) as up:
        _outlive_a_worker(up.wait_until_ready(), "llama")


def _outlive_a_worker(up: MillstreamUp, model: str) -> None:
    """Kill one of two in the middle of eight streams; each must be as one that was let alone."""
    asked: dict[str, Any] = {"model": model, "prompt": "mill", "max_tokens": 1000}
    asked |= {"temperature": 0, "ignore_eos": True}
    with ask(up, **asked) as answer:
        undisturbed = json.load(answer)["choices"][0]["text"]
    texts = {str(number): "" for number in range(8)}
    counts, running = dict.fromkeys(texts, 0), set(texts)
    attempts: set[int] = set()

    def read() -> None:
        """One frame."""
        frame = json.loads(stream.recv(timeout=30))
        name, kind = frame["id"], frame["type"]
        assert kind in ("accepted", "started", "chunk", "done"), frame
        if kind == "started":
            attempts.add(frame["attempt"])
        elif kind == "chunk":
            assert frame["index"] == counts[name]
            counts[name] += frame["count"]
            texts[name] += frame["text"]
        elif kind == "done":
            running.remove(name)

    door = up.url.replace("http", "ws") + "/v1/stream"
    with connect(door, additional_headers={"Authorization": f"Bearer {KEY}"}) as stream:
        for name in texts:
            stream.send(json.dumps({"type": "generate", "id": name, **asked}))
        while not all(counts.values()):
            read()
        os.kill(up.pids("worker")[0], signal.SIGKILL)
        while running:
            read()
    assert set(texts.values()) == {undisturbed}
    assert 2 in attempts


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    """With the option that chooses another."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with MillstreamUp(tmp_path, *MOCK, port=other.getsockname()[1]) as up:
            assert up.process.wait(10) == 1
    assert up.output.read_text().startswith("millstream: port ")
    assert "--port" in up.output.read_text()


def test_the_printed_curl_line_works_as_printed(mock_up: MillstreamUp) -> None:
    """It is the first thing that a stranger pastes."""
    lines = mock_up.output.read_text().splitlines()
    (curl,) = [line for line in lines if line.strip().startswith("curl ")]
    run = subprocess.run(curl, shell=True, capture_output=True, text=True, check=True, timeout=30)
    assert "\ndata: {" in run.stdout
    assert run.stdout.rstrip().endswith("data: [DONE]")


def test_a_restart_keeps_the_key_that_was_made(tmp_path: Path) -> None:
    """Clients go on with the key they have."""
    key = ""
    for _ in range(2):
        with MillstreamUp(tmp_path, *MOCK[:-2]) as up:
            up.wait_until_ready()
            found = (tmp_path / "data/api-key").read_text().strip()
            assert found not in up.output.read_text()  # which is no terminal
            assert key in ("", found)
            key = found
            assert tokens(up, key) == 4
            assert up.stop() == 0


def test_tenants_come_from_the_file(tmp_path: Path) -> None:
    """Their keys work beside the key of `default`."""
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.acme]\nkeys = ['sk-acme']\nmax_output_tokens = 3")
    with MillstreamUp(tmp_path, *MOCK, "--config", str(file)) as up:
        up.wait_until_ready()
        assert tokens(up) == 4
        assert tokens(up, "sk-acme", max_tokens=3) == 3
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(up, "sk-acme", max_tokens=4)


def test_a_second_gateway_that_is_told_nothing_knows_whom_the_first_one_knows(
    up: MillstreamUp, tmp_path: Path
) -> None:
    """Nobody is locked out by it, neither there nor here."""
    port = free_port()
    words = ("gateway", "--port", str(port), "--data-dir", str(up.home / "data"))
    with millstream_process(*words, cwd=tmp_path) as second:
        wait_until(lambda: answers(up, port), 10)
        assert answers(up)
        second.terminate()
        assert second.wait(10) == 0


def test_a_key_that_is_given_is_the_one_whatever_the_file_says(tmp_path: Path) -> None:
    """And it is where clients look for it."""
    file = tmp_path / "file.toml"
    file.write_text("api_key = 'sk-file'")
    with MillstreamUp(tmp_path, *MOCK, "--config", str(file)) as up:
        up.wait_until_ready()
        assert tokens(up) == 4
        assert (tmp_path / "data/api-key").read_text() == f"{KEY}\n"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(up, "sk-file")


def test_a_start_that_fails_keeps_no_key(tmp_path: Path) -> None:
    """The next one could not start either, or would lock everybody out."""
    file = tmp_path / "tenants.toml"
    file.write_text(f"[tenants.acme]\nkeys = ['{KEY}']")
    with MillstreamUp(tmp_path, *MOCK, "--config", str(file)) as up:
        assert up.process.wait(20) == 1
        assert "'default' already belongs to tenant 'acme'" in up.output.read_text()
    assert not (tmp_path / "data/api-key").exists()


def test_other_commands_find_the_server_it_left(mock_up: MillstreamUp, tmp_path: Path) -> None:
    """`millstream lag` in another terminal, with no URL; not one that is somewhere else."""
    found = run_millstream("models", "list", "--json", "--data-dir", str(mock_up.home / "data"))
    assert [model["name"] for model in json.loads(found.stdout)] == ["mock"]
    lost = run_millstream("models", "list", "--data-dir", str(tmp_path))
    assert (lost.returncode, lost.stdout) == (2, "")
    assert lost.stderr == f"millstream: no `millstream up` runs in {tmp_path}\n"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("empty", "is empty"), ("m.gguf", "must be converted"), ("nothing", "no directory is called")],
)
def test_what_is_no_model_is_said_before_anything_starts(
    tmp_path: Path, name: str, reason: str
) -> None:
    """The sentence of `models add`, and no data directory of a cell that never was."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    words = ("up", "--model", str(tmp_path / name), "--data-dir", str(tmp_path / "data"))
    done = run_millstream(*words)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f"{tmp_path / name}" in line
    assert reason in line
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("lag", "worker-1"),
        ("models list", "mock"),
        ("models show mock", "default_version"),
        ("dead list", "request"),
        ("usage", "quotas"),
        ("why --tenant default", "A new request would wait"),
    ],
)
def test_what_operators_read_fits_a_terminal(
    mock_up: MillstreamUp, command: str, part: str
) -> None:
    """Of 80 columns; sentences are wrapped at words. In a pipe every line is whole."""
    words = (*command.split(), "--data-dir", str(mock_up.home / "data"))
    lines = run_in_terminal(80, *words)
    assert part in " ".join(lines)
    assert max(map(len, lines)) <= 80
    assert part in run_millstream(*words).stdout


def test_lag_is_shown_again_every_second(mock_up: MillstreamUp) -> None:
    """To a pipe as soon as it is known: tables, or a line of JSON each."""
    words = ("lag", "--watch", "--data-dir", str(mock_up.home / "data"))
    with millstream_process(*words, "--json") as watching:
        assert watching.stdout
        for _ in range(2):
            (worker,) = json.loads(watching.stdout.readline())["workers"]
            assert worker["model"] == "mock"
        watching.stdout.close()  # as `head` does when it has seen enough
        assert watching.wait(5) == 0
    with millstream_process(*words) as watching:
        assert watching.stdout
        for title in ("Lanes", "Workers") * 2:
            assert any(title in line for line in watching.stdout)
        watching.stdout.close()
        assert watching.wait(5) == 0


def test_a_second_one_in_the_same_directory_is_refused(
    mock_up: MillstreamUp, tmp_path: Path
) -> None:
    """Two brokers on one store would destroy it."""
    with MillstreamUp(tmp_path, *MOCK, "--data-dir", str(mock_up.home / "data")) as second:
        assert second.process.wait(10) == 1
        assert "another `millstream up` uses" in second.output.read_text()
