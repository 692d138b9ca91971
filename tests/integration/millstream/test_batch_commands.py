"""`millstream batch`: from a file to the results of all its lines."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import jobs.service
from millstream.batch import commands
from millstream.batch.settings import (
    EstimateSettings,
    ItemSettings,
    OneBatchSettings,
    ResultsSettings,
    SubmitSettings,
)
from tests.integration.jobs.test_batches import chat_line, to_file
from tests.support.gateways import KEY, cell
from tests.support.services import jobs_settings, running

STOP = asyncio.Event()
LINES = [chat_line(0), chat_line(1, model="nobody"), chat_line(2)]


@pytest.fixture
async def gateway(nats_url: str) -> AsyncIterator[dict[str, Any]]:
    """The settings by which the commands find a gateway."""
    async with cell(nats_url) as (found,), running(jobs.service, jobs_settings(nats_url)):
        yield {"url": found.url, "api_key": KEY, "json": True}


def write_input(path: Path) -> None:
    path.write_bytes(to_file(LINES)[1])


async def submit(gateway: dict[str, Any], path: Path, **options: Any) -> None:
    write_input(path)
    await commands.submit(SubmitSettings.model_validate({**gateway, "file": path, **options}), STOP)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The last line of what was printed, as JSON."""
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


async def test_a_file_is_estimated_run_and_read_and_its_failed_lines_retried(
    gateway: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results are those of both files, in the order of the input."""
    path = tmp_path / "in.jsonl"
    await submit(gateway, path)
    batch = printed(capsys)["id"]
    one = {**gateway, "id": batch}
    await commands.watch(OneBatchSettings.model_validate(one), STOP)
    assert printed(capsys)["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    out = tmp_path / "out.jsonl"
    await commands.results(ResultsSettings.model_validate({**one, "output": out}), STOP)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["id-0", "id-1", "id-2"]
    assert [line["response"]["status_code"] for line in lines] == [200, 404, 200]
    await commands.items(ItemSettings.model_validate({**one, "item": "id-2"}), STOP)
    assert printed(capsys)["status"] == "completed"
    await commands.retry(OneBatchSettings.model_validate(one), STOP)
    again = printed(capsys)
    assert again["retry_of"] == batch
    await commands.watch(OneBatchSettings.model_validate({**gateway, "id": again["id"]}), STOP)
    assert printed(capsys)["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    await commands.estimate(EstimateSettings.model_validate({**gateway, "file": path}), STOP)
    estimate = printed(capsys)
    assert estimate["lines"] == 3
    assert estimate["completion_tokens"]["at_most"] == 16
    words = {**gateway, "file": path, "json": False}
    await commands.estimate(EstimateSettings.model_validate(words), STOP)
    assert "at most 16" in capsys.readouterr().out


async def test_hours_are_two_times(gateway: dict[str, Any], tmp_path: Path) -> None:
    """They are told with their zone."""
    with pytest.raises(ValueError, match="two times"):
        await submit(gateway, tmp_path / "in.jsonl", run_between=("22:00",))
    await submit(gateway, tmp_path / "in.jsonl", run_between=("00:00", "23:59"))
