"""Submits a prompt over NATS and prints the answer as it comes: producer.py [URL [MODEL]]."""

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import nats
from nats.aio.client import Client
from nats.aio.subscription import Subscription


async def read_stored(nc: Client, subject: str, after: int) -> AsyncIterator[tuple[int, bytes]]:
    """A request's stored records, behind the sequence `after`; some gateway reads them."""
    question = subject.replace("infer.reply.", "infer.records.", 1)
    while True:
        answer = await nc.request(question, json.dumps({"after": after}).encode(), timeout=5)
        page = msgpack.unpackb(answer.data)
        if "error" in page:
            raise RuntimeError(page["error"])
        for after, record in page["records"]:
            yield after, record
        if not page["remaining"]:
            return


async def read_replies(nc: Client, replies: Subscription) -> AsyncIterator[dict[str, Any]]:
    """Every record of one request, once: what was missed is read where it is stored."""
    last = 0
    async for message in replies.messages:
        headers = message.headers or {}
        if int(headers["Nats-Last-Sequence"]) > last:
            async for seq, record in read_stored(nc, message.subject, last):
                last = seq
                yield msgpack.unpackb(record)
        if int(headers["Nats-Sequence"]) > last:
            last = int(headers["Nats-Sequence"])
            yield msgpack.unpackb(message.data)


async def main(url: str = "nats://127.0.0.1:4222", model: str = "gemma-3-270m") -> None:
    nc = await nats.connect(url)
    route = f"example-{uuid.uuid4().hex}"
    replies = await nc.subscribe(f"infer.reply.default.{route}.>")
    await nc.flush()
    body = {"prompt": "The old mill by the stream", "max_tokens": 40}
    headers = {"Content-Type": "application/json", "Nats-Msg-Id": uuid.uuid4().hex, "Route": route}
    subject = f"infer.submit.default.{model}.interactive"
    await nc.jetstream().publish(subject, json.dumps(body).encode(), headers=headers)
    printed = 0  # characters; after a disaster the answer may be sent again from its start
    async for record in read_replies(nc, replies):
        if record["type"] == "chunk":
            print(record["text"][max(0, printed - record["characters"]) :], end="", flush=True)
            printed = max(printed, record["characters"] + len(record["text"]))
        elif record["type"] in ("done", "error"):
            print(f"\n{record}")
            break
    await nc.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
