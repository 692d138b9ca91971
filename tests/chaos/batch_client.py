"""A tenant's batch, over HTTP: submitted before the faults, and read when it has ended."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tests.chaos.history import BatchEnded, BatchSubmitted
from tests.chaos.plan import PlannedRequest
from tests.chaos.recording_client import Record

ANSWER_SECONDS = 5.0
PAUSE_SECONDS = 0.25
ENDPOINT = "/v1/completions"
DEADLINE_MS = 30_000  # after which a line whose request was lost with its stream is tried again
FINAL = ("completed", "failed", "expired", "cancelled")
NOT_FOUND = "not found"


class BatchClient:
    """Asks whichever gateway answers."""

    def __init__(
        self,
        tenant: str,
        key: str,
        gateways: Sequence[str],
        clock: Callable[[], float],
        record: Record,
    ) -> None:
        self.batch_id, self._tenant = "", tenant
        urls = [url.replace("ws://", "http://").removesuffix("/v1/stream") for url in gateways]
        self._urls = itertools.cycle(urls)
        self._headers = {"Authorization": f"Bearer {key}"}
        self._clock, self._record = clock, record
        self._asks: list[PlannedRequest] = []

    async def submit(self, asks: Sequence[PlannedRequest]) -> None:
        """Upload the lines and make a batch of them: all gateways serve."""
        self._asks = list(asks)
        async with httpx.AsyncClient(
            base_url=next(self._urls), headers=self._headers, timeout=None
        ) as client:
            lines = "".join(json.dumps(_line(ask)) + "\n" for ask in asks)
            form = {"file": ("lines.jsonl", lines.encode())}
            made = await client.post("/v1/files", data={"purpose": "batch"}, files=form)
            asked = {"endpoint": ENDPOINT, "completion_window": "24h"}
            asked["input_file_id"] = made.raise_for_status().json()["id"]
            batch = await client.post("/v1/batches", json=asked)
            self.batch_id = batch.raise_for_status().json()["id"]

    def note_begin(self) -> None:
        """Record what was submitted, before the load began."""
        lines = {ask.name: ask.words for ask in self._asks}
        self._record(BatchSubmitted(self._clock(), self.batch_id, self._tenant, lines))

    async def read(self, seconds: float) -> None:
        """Record the batch's status and files once it has ended, or as it is after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            found = await self._ask(f"/v1/batches/{self.batch_id}", deadline)
            if found is None or time.monotonic() > deadline:
                break
            if found.status_code == httpx.codes.NOT_FOUND:
                return self._record(BatchEnded(self._clock(), self.batch_id, NOT_FOUND))
            if (batch := found.json())["status"] in FINAL:
                output = await self._lines(batch["output_file_id"], deadline)
                errors = await self._lines(batch["error_file_id"], deadline)
                return self._record(_ended(self._clock(), batch, output, errors))
            await asyncio.sleep(PAUSE_SECONDS)
        return None

    async def _lines(self, file: str | None, deadline: float) -> list[dict[str, Any]]:
        if file is None:
            return []
        found = await self._ask(f"/v1/files/{file}/content", deadline + ANSWER_SECONDS)
        return [json.loads(line) for line in found.text.splitlines()] if found else []

    async def _ask(self, path: str, deadline: float) -> httpx.Response | None:
        """The first answer that is one; None if there was none in time."""
        while time.monotonic() < deadline:
            try:
                async with httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
                    found = await client.get(next(self._urls) + path, headers=self._headers)
            except httpx.HTTPError:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if found.status_code < 500 and found.status_code != httpx.codes.TOO_MANY_REQUESTS:
                return found
            await asyncio.sleep(PAUSE_SECONDS)
        return None


def _line(ask: PlannedRequest) -> dict[str, Any]:
    body = {
        "model": "mock",
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "deadline_ms": DEADLINE_MS,
    }
    return {"custom_id": ask.name, "method": "POST", "url": ENDPOINT, "body": body}


def _ended(
    at: float, batch: dict[str, Any], output: list[dict[str, Any]], errors: list[dict[str, Any]]
) -> BatchEnded:
    return BatchEnded(
        at,
        batch["id"],
        batch["status"],
        answered=[line["custom_id"] for line in output],
        texts=[line["response"]["body"]["choices"][0]["text"] for line in output],
        failed=[line["custom_id"] for line in errors],
        codes=[_code(line) for line in errors],
    )


def _code(line: dict[str, Any]) -> str:
    error = line["error"] or line["response"]["body"]["error"]
    return str(error["code"])
