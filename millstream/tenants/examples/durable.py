"""Asks for a durable answer and reads it, now or days later: durable.py ID [PROMPT]."""

import asyncio
import json
import ssl
import sys
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client

URL = "nats://127.0.0.1:4222"
CA = ""  # certificates by which the server is known, where it speaks TLS
TENANT = "default"
MODEL = "gemma-3-270m"
CREDENTIALS = Path(__file__).with_name(f"{TENANT}.creds")
API = "ANSWERS.API"  # JetStream's calls for the tenant's own stream of answers


async def read_answer(nc: Client, key: str) -> dict[str, Any] | None:
    """The answer to the request with an id of ours; None while there is none."""
    subject = f"{API}.DIRECT.GET.ANSWERS_{TENANT}.infer.answer.{TENANT}.{key}"
    last = await nc.request(subject, timeout=5)
    headers = last.headers or {}
    if "Status" in headers:  # 404: not yet
        return None
    numbers = range(int(headers.get("Parts", "1")) - 1)  # an answer larger than a message
    parts = [await nc.request(f"{subject}.{headers['Nonce']}-{n}", timeout=5) for n in numbers]
    if any("Status" in (part.headers or {}) for part in parts):
        raise RuntimeError("parts of the answer are gone: purge it, and submit again")
    whole: dict[str, Any] = json.loads(b"".join(part.data for part in [*parts, last]))
    return whole


async def main(key: str, prompt: str = "The old mill by the stream") -> None:
    tls = ssl.create_default_context(cafile=CA) if CA else None
    nc = await nats.connect(
        URL.split(","),
        user_credentials=str(CREDENTIALS),
        tls=tls,
        tls_handshake_first=bool(CA),
        max_reconnect_attempts=5,
    )
    headers = {"Nats-Msg-Id": key, "Accept": "application/json", "Answer": "durable"}
    body = {"prompt": prompt, "max_tokens": 40}
    subject = f"infer.submit.{TENANT}.{MODEL}.standard"
    if await read_answer(nc, key) is None:  # the same id again is the same request
        await nc.jetstream().publish(subject, json.dumps(body).encode(), headers=headers)
    while (answer := await read_answer(nc, key)) is None:
        await asyncio.sleep(0.5)
    print(answer.pop("text", ""))
    print(answer)
    js = nc.jetstream(prefix=API)
    await js.purge_stream(f"ANSWERS_{TENANT}", subject=f"infer.answer.{TENANT}.{key}")
    await nc.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
