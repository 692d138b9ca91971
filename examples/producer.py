"""Submits a prompt over NATS and prints the answer as it comes: producer.py [URL [MODEL]]."""

import asyncio
import json
import sys
import uuid

import msgpack
import nats


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
    async for message in replies.messages:
        record = msgpack.unpackb(message.data)
        if record["type"] == "chunk":
            print(record["text"][max(0, printed - record["characters"]) :], end="", flush=True)
            printed = max(printed, record["characters"] + len(record["text"]))
        elif record["type"] in ("done", "error"):
            print(f"\n{record}")
            break
    await nc.close()


asyncio.run(main(*sys.argv[1:]))
