"""Batches of a producer that speaks NATS alone, with the rights of its tenant."""

import asyncio
import json
from typing import Any

import pytest
from nats.aio.client import Client

from gateway.entrypoints import nats_jobs
from gateway.entrypoints.batches.batch_creation import create_batch
from streams.records.jobs.batch_records import Batch
from tests.integration.jobs.test_batches import chat_line, jobs_cell
from tests.support.accounts_server import connect, producer_client
from tests.support.eventually import eventually

LINES = [chat_line(index) for index in range(30)]
DATA = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)


async def ask(client: Client, operation: str, body: Any, **headers: str) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    subject = f"infer.jobs.acme.{operation}"
    return json.loads((await client.request(subject, data, timeout=10, headers=headers)).data)


async def send(client: Client, data: bytes, size: int) -> dict[str, Any]:
    """Send lines in pieces of `size` bytes, and return what starts their batch."""
    upload = (await ask(client, "begin", {"bytes": len(data)}))["id"]
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    parts = [(await ask(client, "add", piece, Upload=upload))["id"] for piece in pieces]
    return {
        "upload_id": upload,
        "part_ids": parts,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }


async def content(client: Client, file_id: str) -> bytes:
    whole, size = b"", 1
    while len(whole) < size:
        body = json.dumps({"file_id": file_id, "offset": len(whole)}).encode()
        page = await client.request("infer.jobs.acme.content", body, timeout=10)
        whole, size = whole + page.data, int((page.headers or {})["Size"])
    return whole


async def has_status(client: Client, batch_id: str, status: str) -> Any:
    batch = await ask(client, "status", {"batch_id": batch_id})
    return batch if batch["status"] == status else None


async def test_a_batch_is_made_and_read_over_nats(nats_url: str) -> None:
    """Lines larger than a piece go in several; a start that is repeated is the same batch."""
    async with jobs_cell(nats_url) as sdk, producer_client(nats_url) as client:
        start = await send(client, DATA, 100)
        batch, again = await ask(client, "start", start), await ask(client, "start", start)
        assert batch["id"] == again["id"]
        ended = await eventually(lambda: has_status(client, batch["id"], "completed"))
        assert ended["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        output = await content(client, ended["output_file_id"])
        lines = [json.loads(line) for line in output.splitlines()]
        assert [line["custom_id"] for line in lines] == [line["custom_id"] for line in LINES]
        assert (await sdk.files.content(ended["output_file_id"])).content == output


async def test_a_batch_is_cancelled_over_nats(nats_url: str) -> None:
    """Each line is in one of its files."""
    async with jobs_cell(nats_url, mock={"itl_ms": 500}) as _, producer_client(nats_url) as client:
        batch = await ask(client, "start", await send(client, DATA, len(DATA)))
        await eventually(lambda: has_status(client, batch["id"], "in_progress"))
        await ask(client, "cancel", {"batch_id": batch["id"]})
        ended = await eventually(lambda: has_status(client, batch["id"], "cancelled"))
        files = [ended["output_file_id"], ended["error_file_id"]]
        texts = [await content(client, file) for file in files if file]
        assert sum(text.count(b"\n") for text in texts) == len(LINES)


async def test_what_is_wrong_is_answered(nats_url: str) -> None:
    """With a code and a sentence, never with silence."""
    async with jobs_cell(nats_url) as _, producer_client(nats_url) as client:
        wrong = {
            "no operation": ("stop", {}, "not_found"),
            "no JSON": ("begin", b"{", "invalid_request"),
            "no bytes": ("begin", {"bytes": 0}, "invalid_request"),
            "too many": ("begin", {"bytes": 2**40}, "payload_too_large"),
            "no upload": ("add", b"x", "not_found"),
            "no batch": ("status", {"batch_id": "batch_x"}, "not_found"),
            "no file": ("content", {"file_id": "file-x"}, "not_found"),
            "unknown field": ("status", {"batch_id": "x", "colour": 1}, "unknown_field"),
        }
        for what, (operation, body, code) in wrong.items():
            answer = await ask(client, operation, body)
            assert (what, answer["error"]["code"]) == (what, code)
        start = await send(client, b"no line\n", 100)
        batch = await ask(client, "start", start)
        failed = await eventually(lambda: has_status(client, batch["id"], "failed"))
        assert failed["errors"]["data"][0]["line"] == 1


async def test_a_tenants_large_batch_holds_up_nobody_else(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are read to their end before it is created; others ask how theirs are meanwhile."""
    begun, may_end, create = asyncio.Event(), asyncio.Event(), create_batch

    async def create_slowly(*words: Any) -> Batch:
        begun.set()
        await may_end.wait()
        return await create(*words)

    monkeypatch.setattr(nats_jobs, "create_batch", create_slowly)
    monkeypatch.setattr(nats_jobs, "MAX_WAITING_OF_TENANT", 2)
    async with (
        jobs_cell(nats_url) as _,
        producer_client(nats_url) as client,
        connect(nats_url, "test") as other,
    ):
        body = await send(client, DATA, len(DATA))
        starting = asyncio.create_task(ask(client, "start", body))
        await begun.wait()
        answer = await other.request("infer.jobs.other.status", b"{}", 10)
        assert answer is not None, "it waits for a batch of another tenant"
        assert json.loads(answer)["error"]["code"] == "forbidden"
        named = {"batch_id": "batch_x"}
        asking = [asyncio.create_task(ask(client, "status", named)) for _ in range(3)]
        (first, *_), _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        assert first.result()["error"]["code"] == "too_many_transfers"
        may_end.set()
        assert (await starting)["object"] == "batch"
        codes = [answer["error"]["code"] for answer in await asyncio.gather(*asking)]
        assert sorted(codes) == ["not_found", "not_found", "too_many_transfers"]
