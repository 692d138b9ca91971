"""Every object of files, uploads, batches and responses is one of the OpenAI SDK's types.

The SDK itself does not validate what it gets: it makes objects with whatever fields there are.
"""

import io
import time
from typing import Any

import httpx
from openai import types
from openai.types import responses
from openai.types.uploads import UploadPart
from pydantic import BaseModel, TypeAdapter

import jobs.service
from tests.support.eventually import eventually
from tests.support.gateways import KEY, cell
from tests.support.services import jobs_settings, running

LINE = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
    b'"body": {"model": "mock", "prompt": "x", "max_tokens": 2}}\n'
)
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}
RESPONSE = {"model": "mock", "input": "hi", "max_output_tokens": 4}


class Api:
    """Asks, and validates what is answered."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, kind: Any, method: str, path: str, **sent: Any) -> Any:
        answer = await self._client.request(method, f"/v1/{path}", **sent)
        assert answer.status_code == 200, answer.text
        parsed = TypeAdapter(kind).validate_json(answer.content)
        assert isinstance(parsed, BaseModel)
        return parsed

    async def page(self, kind: Any, path: str) -> None:
        answer = (await self._client.get(f"/v1/{path}")).json()
        assert answer["object"] == "list"
        assert answer["data"]
        assert (answer["first_id"], answer["last_id"]) == (
            answer["data"][0]["id"],
            answer["data"][-1]["id"],
        )
        for each in answer["data"]:
            TypeAdapter(kind).validate_python(each)

    async def is_over(self, batch: str) -> bool:
        found = await self.ask(types.Batch, "GET", f"batches/{batch}")
        return found.status in ("completed", "failed", "cancelled")


async def test_what_is_answered_is_what_the_sdk_declares(nats_url: str) -> None:
    """From creation to deletion, in every state that an object has on the way."""
    async with (
        cell(nats_url) as (gateway,),
        running(jobs.service, jobs_settings(nats_url)),
        httpx.AsyncClient(
            base_url=gateway.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
        ) as client,
    ):
        api = Api(client)
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", io.BytesIO(LINE))}}
        file = await api.ask(types.FileObject, "POST", "files", **form)
        await _check_uploads(api)
        await api.page(types.FileObject, "files")
        made = {"input_file_id": file.id, **BATCH}
        batch = await api.ask(types.Batch, "POST", "batches", json=made)
        await eventually(lambda: api.is_over(batch.id))
        late = await api.ask(
            types.Batch, "POST", "batches", json={**made, "not_before": int(time.time()) + 3600}
        )
        await api.ask(types.Batch, "POST", f"batches/{late.id}/cancel")
        await eventually(lambda: api.is_over(late.id))
        await api.page(types.Batch, "batches")
        await api.ask(types.FileDeleted, "DELETE", f"files/{file.id}")
        for more in ({}, {"background": True}):
            response = await api.ask(
                responses.Response, "POST", "responses", json={**RESPONSE, **more}
            )
            path = f"responses/{response.id}"
            await api.ask(responses.Response, "GET", path)
            await api.page(responses.ResponseItem, f"{path}/input_items")
        await api.ask(types.Model, "GET", "models/mock")


async def _check_uploads(api: Api) -> None:
    wanted = {
        "filename": "in.jsonl",
        "purpose": "batch",
        "bytes": len(LINE),
        "mime_type": "application/jsonl",
    }
    upload = await api.ask(types.Upload, "POST", "uploads", json=wanted)
    path, data = f"uploads/{upload.id}", {"data": ("part", io.BytesIO(LINE))}
    part = await api.ask(UploadPart, "POST", f"{path}/parts", files=data)
    done = await api.ask(types.Upload, "POST", f"{path}/complete", json={"part_ids": [part.id]})
    assert done.file
    left = await api.ask(types.Upload, "POST", "uploads", json=wanted)
    await api.ask(types.Upload, "POST", f"uploads/{left.id}/cancel")
