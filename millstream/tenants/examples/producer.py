"""Submits a prompt over NATS and prints the answer as it comes: producer.py [PROMPT]."""

import asyncio
import json
import ssl
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import nats
from nats.aio.client import Client
from nats.aio.subscription import Subscription

URL = "nats://127.0.0.1:4222"
CA = ""  # certificates by which the server is known, where it speaks TLS
TENANT = "default"
MODEL = "gemma-3-270m"
CREDENTIALS = Path(__file__).with_name(f"{TENANT}.creds")


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
    """Every record of one request, each chunk once: what was missed is read where it is stored.

    So is a log that brokers have lost and a worker has put back, under other sequences.
    """
    last = received = 0  # the last record's sequence, and how many tokens came
    async for message in replies.messages:
        headers = message.headers or {}
        found = [(int(headers["Nats-Sequence"]), message.data)]
        if found[0][0] == last:
            continue
        if int(headers["Nats-Last-Sequence"]) != last:
            found = [stored async for stored in read_stored(nc, message.subject, 0)]
        for sequence, packed in found:
            last, record = sequence, msgpack.unpackb(packed)
            end = record.get("index", received) + record.get("count", 1)
            if end > received:
                received = end if record["type"] == "chunk" else received
                yield record


async def main(prompt: str = "The old mill by the stream") -> None:
    tls = ssl.create_default_context(cafile=CA) if CA else None
    nc = await nats.connect(
        URL.split(","),
        user_credentials=str(CREDENTIALS),
        tls=tls,
        tls_handshake_first=bool(CA),
        max_reconnect_attempts=5,
    )
    route = f"example-{uuid.uuid4().hex}"
    replies = await nc.subscribe(f"infer.reply.{TENANT}.{route}.>")
    await nc.flush()
    body = {"prompt": prompt, "max_tokens": 40}
    headers = {"Content-Type": "application/json", "Nats-Msg-Id": uuid.uuid4().hex, "Route": route}
    subject = f"infer.submit.{TENANT}.{MODEL}.interactive"
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
