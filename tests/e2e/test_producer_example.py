"""The producers that `tenants add --producer` writes, run as they stand."""

import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.tenants.producer_files import EXAMPLES
from streams.subjects import unescape
from tests.support.millstream_up import MillstreamUp, run_millstream

MODULES = Path(__file__).parents[2] / "build/node/node_modules"


@pytest.fixture(scope="module")
def producer(mock_up: MillstreamUp, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the tenant of `--api-key` needs to submit over NATS."""
    directory = tmp_path_factory.mktemp("producer")
    home = str(mock_up.home / "data")
    words = ("tenants", "change", "default", "--producer", str(directory), "--json")
    done = run_millstream(*words, MILLSTREAM_DATA_DIR=home)
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)["producer"]["files"]
    names = {"default.creds", *EXAMPLES}
    assert {Path(each).name for each in written} == names
    secret = (directory / "default.creds").read_text()
    assert stat.S_IMODE((directory / "default.creds").stat().st_mode) == 0o600
    assert not [line for line in secret.splitlines() if len(line) > 40 and line in done.stdout]
    return directory


def link_modules(producer: Path) -> None:
    if not (producer / "node_modules").exists():
        (producer / "node_modules").symlink_to(MODULES)


def check_answer(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text, _, terminal = done.stdout.strip().rpartition("\n")
    assert len(text.split()) == 40
    assert "length" in terminal


def test_the_python_producer_prints_a_whole_answer(producer: Path) -> None:
    """It is what people copy: connect, submit, read to the end, over plain nats-py."""
    check_answer([sys.executable, str(producer / "producer.py")])


def test_the_javascript_producer_prints_a_whole_answer(producer: Path) -> None:
    """The same with nats.js and Node."""
    assert MODULES.is_dir(), f"there is no {MODULES}: run `make node`"
    link_modules(producer)
    check_answer(["node", str(producer / "producer.mjs")])


def test_durable_answers_are_read_by_both(producer: Path) -> None:
    """With a NATS client alone: no msgpack, no consumer, no subscription."""
    link_modules(producer)
    check_answer([sys.executable, str(producer / "durable.py"), "python-1"])
    check_answer(["node", str(producer / "durable.mjs"), "node-1"])


@pytest.mark.parametrize("command", [sys.executable, "node"])
def test_a_batch_runs_with_a_nats_client_alone(
    producer: Path, tmp_path: Path, command: str
) -> None:
    """Lines in, results out, in order."""
    link_modules(producer)
    model = _model_of(producer)
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [
        {"custom_id": f"l{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n in range(5)
    ]
    source, results = tmp_path / "lines.jsonl", tmp_path / "results.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    program = producer / ("job.mjs" if command == "node" else "job.py")
    words = [command, str(program), str(source), str(results)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "completed" in done.stdout
    found = [json.loads(line)["custom_id"] for line in results.read_text().splitlines()]
    assert found == [line["custom_id"] for line in lines]


def _model_of(producer: Path) -> str:
    """The model for which the command has written the programs, as it is in a subject."""
    (told,) = re.findall(r'^MODEL = "(.*)"$', (producer / "producer.py").read_text(), re.MULTILINE)
    return unescape(told)


def test_a_tenant_is_made_used_and_cut_off(mock_up: MillstreamUp, tmp_path: Path) -> None:
    """By three commands on the machine itself, which need no settings."""
    home = {"MILLSTREAM_DATA_DIR": str(mock_up.home / "data")}
    directory = tmp_path / "new" / "acme"
    added = run_millstream("tenants", "add", "acme", "--producer", str(directory), **home)
    assert added.returncode == 0, added.stderr
    assert str(directory / "acme.creds") in added.stdout.replace("\n", "")
    command = [sys.executable, str(directory / "producer.py")]
    check_answer(command)
    cut = run_millstream("tenants", "change", "acme", "--withdraw", **home)
    assert "cut off" in cut.stdout, cut.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "Authorization Violation" in done.stderr
    removed = run_millstream("tenants", "remove", "acme", **home)
    assert removed.returncode == 0, removed.stderr


def test_a_directory_that_cannot_be_written_is_told_before_anything_is_made(
    mock_up: MillstreamUp, tmp_path: Path
) -> None:
    """Credentials are shown once: what cannot be kept must not be issued."""
    home = {"MILLSTREAM_DATA_DIR": str(mock_up.home / "data")}
    (tmp_path / "file").write_text("")
    words = ("tenants", "add", "beta", "--producer", str(tmp_path / "file"))
    refused = run_millstream(*words, **home)
    assert refused.returncode != 0
    assert "name another directory" in refused.stderr
    listed = run_millstream("tenants", "list", "--json", **home)
    assert "beta" not in listed.stdout
