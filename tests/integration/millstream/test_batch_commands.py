"""`millstream batch …` against a running cell, as its users type it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx

import jobs.service
from tests.integration.jobs.test_batches import chat_line, to_file
from tests.support.gateways import KEY, RunningGateway, cell
from tests.support.services import jobs_settings, running


class Answer(NamedTuple):
    """Output of a command, and its exit status."""

    status: int
    out: str
    errors: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.errors
        return json.loads(self.out)


async def batch(gateway: RunningGateway, *words: str) -> Answer:
    return await command(gateway, "batch", *words)


async def command(gateway: RunningGateway, *words: str) -> Answer:
    told = ("--url", gateway.url, "--api-key", KEY)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millstream", *words, *told, stdout=-1, stderr=-1
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    return Answer(process.returncode, out.decode(), errors.decode())


async def stored_files(gateway: RunningGateway) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as http:
        return (await http.get("/v1/files")).json()["data"]


async def test_a_batch_is_submitted_watched_and_read(nats_url: str, tmp_path: Path) -> None:
    """Each command with JSON for programs; the results are in the order of the input."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(to_file([*map(chat_line, range(5)), chat_line(5, model="nobody")])[1])
    async with cell(nats_url) as (gateway,), running(jobs.service, jobs_settings(nats_url)):
        made = (await batch(gateway, "submit", str(source), "--json")).json
        assert made["status"] == "validating"
        watched = await batch(gateway, "watch", made["id"], "--json")
        assert watched.status == 0, watched.errors
        assert json.loads(watched.out.splitlines()[-1])["status"] == "completed"
        shown = await batch(gateway, "status", made["id"])
        assert "5 completed, 1 failed" in " ".join(shown.out.split())
        listed = await batch(gateway, "list", "--json")
        assert [json.loads(line)["id"] for line in listed.out.splitlines()] == [made["id"]]
        table = (await batch(gateway, "list")).out
        assert f"{made['id']} completed" in " ".join(table.replace("│", " ").split())
        await batch(gateway, "results", made["id"], "--output", str(out))
        ids = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
        assert ids == [f"id-{i}" for i in range(6)]
        assert (await batch(gateway, "items", made["id"], "id-5", "--json")).json["index"] == 5
        refused = await batch(gateway, "cancel", made["id"])
        assert refused.status == 1
        assert "has ended" in refused.errors


async def test_a_batch_that_cannot_begin_says_why(nats_url: str, tmp_path: Path) -> None:
    """The lines that are wrong, an id that nobody has, a gateway that is not there."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"no json\n")
    async with cell(nats_url) as (gateway,), running(jobs.service, jobs_settings(nats_url)):
        made = (await batch(gateway, "submit", str(source), "--json")).json
        watched = await batch(gateway, "watch", made["id"])
        assert watched.status == 1
        assert "line 1: this is not JSON" in " ".join(watched.out.split())
        unknown = await batch(gateway, "status", "batch_nobody")
        assert (unknown.status, "no batch 'batch_nobody'" in unknown.errors) == (1, True)
        missing = await batch(gateway, "submit", str(tmp_path / "none.jsonl"))
        assert missing.status == 1
        assert missing.errors.endswith("none.jsonl: No such file or directory\n")
        gone = await batch(RunningGateway(1, asyncio.Event()), "status", "batch_nobody")
        assert "no gateway answers at" in gone.errors


async def test_a_file_is_estimated_and_its_failed_lines_are_retried(
    nats_url: str, tmp_path: Path
) -> None:
    """An estimate needs no run; hours are two times of day."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(to_file([chat_line(0), chat_line(1, model="nobody")])[1])
    async with cell(nats_url) as (gateway,), running(jobs.service, jobs_settings(nats_url)):
        estimate = (await batch(gateway, "estimate", str(source), "--json")).json
        assert estimate["lines"] == 2
        told = (await batch(gateway, "estimate", str(source))).out
        assert f"at most {estimate['completion_tokens']['at_most']}" in " ".join(told.split())
        assert estimate["unusable_lines"] == 1
        assert "2: 1 of mock, 1 that no model would answer" in told
        assert "none: no model has a price" in told
        half = await batch(gateway, "submit", str(source), "--run-between", "22:00")
        assert (half.status, "run-between" in half.errors) == (2, True)
        zone = ("--run-between", "22:00-06:00", "--time-zone", "Mars")
        nowhere = await batch(gateway, "submit", str(source), *zone)
        assert nowhere.errors == "millstream: 'Mars' is no time zone such as Europe/Berlin\n"
        assert not await stored_files(gateway)
        hours = "--run-between", "00:00-23:59"
        made = (await batch(gateway, "submit", str(source), *hours, "--json")).json
        assert (await batch(gateway, "watch", made["id"])).status == 0
        kept = tmp_path / "kept.jsonl"
        kept.write_text("of another batch")
        refused = await batch(gateway, "results", "batch_nobody", "--output", str(kept))
        assert (refused.status, kept.read_text()) == (1, "of another batch")
        options = ("--window", "3h", "--metadata", "team=a=b", "--metadata", "try=2", *hours)
        again = (await batch(gateway, "retry", made["id"], *options, "--json")).json
        assert again["retry_of"] == made["id"]
        assert (again["completion_window"], again["run_between"]) == ("3h", ["00:00", "23:59"])
        assert again["metadata"] == {"team": "a=b", "try": "2"}
        shown = (await batch(gateway, "status", again["id"])).out
        assert "team=a=b" in shown
        wrong = await batch(gateway, "retry", made["id"], "--metadata", "team")
        assert (wrong.status, "such as team=search" in wrong.errors) == (2, True)
        watched = await batch(gateway, "watch", again["id"], "--json")
        counts = json.loads(watched.out.splitlines()[-1])["request_counts"]
        assert counts == {"total": 1, "completed": 0, "failed": 1}
