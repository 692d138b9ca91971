"""`millstream bench` against a running Millstream, as people run it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.millstream_up import KEY, MillstreamUp, run_millstream

TRACE = "t_s,prompt_tokens,output_tokens,tenant_id\n" + "".join(
    f"{i / 10},{20 + i},{100 - i},c{i % 3}\n" for i in range(20)
)


def bench(up: MillstreamUp, *words: str, key: str = KEY) -> "subprocess.CompletedProcess[str]":
    return run_millstream("bench", "--url", up.url, "--api-key", key, *words)


def test_it_finds_the_gateway_and_the_key_that_up_left(mock_up: MillstreamUp) -> None:
    """Whatever its port, and whether the key was made or given."""
    data = str(mock_up.home / "data")
    done = run_millstream("bench", "--data-dir", data, "--requests", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"]["completed"] == 3


def report(up: MillstreamUp, *words: str) -> Any:
    done = bench(up, "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["report"]


@pytest.mark.parametrize(
    "client", [("--codec", "json"), ("--codec", "msgpack"), ("--protocol", "sse")]
)
def test_each_client_counts_every_token(mock_up: MillstreamUp, client: tuple[str, str]) -> None:
    """What is measured must be what was asked for: exact lengths in, exact lengths out."""
    words = ("--concurrency", "8", "--requests", "40", "--prompt-tokens", "50")
    found = report(mock_up, *words, "--output-tokens", "30", *client)
    assert (found["requests"], found["completed"], found["errors"]) == (40, 40, {})
    assert (found["prompt_tokens"], found["output_tokens"]) == (2000, 1200)
    assert 5 < found["latencies_ms"]["ttft"]["p50"] < found["latencies_ms"]["end_to_end"]["p50"]


def test_a_trace_is_replayed_and_cut_to_fit(mock_up: MillstreamUp) -> None:
    """Its times scaled, its prompts and outputs shortened to what was said."""
    with (mock_up.home / "trace.csv").open("w") as out:
        out.write(TRACE)
    found = report(
        mock_up,
        *("--trace", str(mock_up.home / "trace.csv"), "--rate", "40"),
        *("--max-prompt-tokens", "25", "--max-output-tokens", "10"),
    )
    assert (found["completed"], found["output_tokens"]) == (20, 200)
    assert found["prompt_tokens"] == sum(min(20 + i, 25) for i in range(20))
    assert found["latencies_ms"].keys() >= {"ttft", "ttft_since_sent", "end_to_end_since_sent"}


def test_the_table_and_the_picture_are_for_people(mock_up: MillstreamUp, tmp_path: Path) -> None:
    """The default output, with the CPU of a process that was named and of the bench itself."""
    gateway = mock_up.pids("gateway")[0]
    words = ["--concurrency", "16", "--requests", "300", "--pids", f"gateway={gateway}"]
    done = bench(mock_up, *words, "--plot", str(tmp_path / "plot.png"))
    assert done.returncode == 0, done.stderr
    for part in ("300 of 300", "time to first token", "inter-token", "decode", "gateway", "bench"):
        assert part in done.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_model_ends_before_any_load(mock_up: MillstreamUp) -> None:
    """A table of nothing would hide the reason."""
    done = bench(mock_up, "--model", "absent")
    assert done.returncode == 1
    assert "'absent' does not exist" in done.stderr


def test_a_wrong_key_ends_before_any_load(mock_up: MillstreamUp) -> None:
    """A thousand refusals would say no more than one."""
    done = bench(mock_up, key="sk-wrong")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f"{mock_up.url} does not know the API key (401): give --api-key" in line


def test_the_key_of_a_named_data_directory_wins_over_the_environments(
    mock_up: MillstreamUp,
) -> None:
    """It is the key of the gateway that is found there; the other one may be of any cell."""
    words = ("bench", "--data-dir", str(mock_up.home / "data"), "--requests", "2", "--json")
    foreign = {"MILLSTREAM_API_KEY": "sk-of-another-cell"}
    done = run_millstream(*words, **foreign)
    assert done.returncode == 0, done.stderr
    done = run_millstream(*words, "--api-key", "sk-given", **foreign)
    assert (done.returncode, "does not know the API key" in done.stderr) == (1, True)


def test_a_nonsensical_combination_is_refused(mock_up: MillstreamUp) -> None:
    """Open and closed loops exclude each other; the message says which words do."""
    done = bench(mock_up, "--rate", "5", "--concurrency", "5")
    assert done.returncode == 2
    assert "--rate" in done.stderr
