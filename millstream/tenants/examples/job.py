"""Runs a batch over NATS and writes its results: job.py LINES.jsonl RESULTS.jsonl."""

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
CREDENTIALS = Path(__file__).with_name(f"{TENANT}.creds")
PIECE = 524_288  # bytes of a message; lines may begin in one and end in another


async def ask(nc: Client, operation: str, body: Any, **headers: str) -> Any:
    """Ask some gateway; a question that was not answered may be asked again."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await nc.request(f"infer.jobs.{TENANT}.{operation}", data, timeout=30, headers=headers)
    if "Error" in (answer.headers or {}):
        raise RuntimeError(json.loads(answer.data)["error"])
    return answer.data if operation == "content" else json.loads(answer.data)


async def start(nc: Client, lines: bytes) -> str:
    """Send the lines of a batch and start it; return its id."""
    upload = (await ask(nc, "begin", {"bytes": len(lines)}))["id"]
    pieces = [lines[at : at + PIECE] for at in range(0, len(lines), PIECE)]
    parts = [(await ask(nc, "add", piece, Upload=upload))["id"] for piece in pieces]
    wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = await ask(nc, "start", {"upload_id": upload, "part_ids": parts, **wanted})
    return str(batch["id"])


async def read_file(nc: Client, file_id: str) -> bytes:
    whole = b""
    while piece := await ask(nc, "content", {"file_id": file_id, "offset": len(whole)}):
        whole += piece
    return whole


async def main(lines: bytes) -> bytes:
    tls = ssl.create_default_context(cafile=CA) if CA else None
    nc = await nats.connect(
        URL.split(","),
        user_credentials=str(CREDENTIALS),
        tls=tls,
        tls_handshake_first=bool(CA),
        max_reconnect_attempts=5,
    )
    batch_id = await start(nc, lines)
    print(batch_id)  # all that must be kept until the results are read
    while True:
        batch = await ask(nc, "status", {"batch_id": batch_id})
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            break
        await asyncio.sleep(1)
    files = [batch["output_file_id"], batch["error_file_id"]]
    results = b"".join([await read_file(nc, file) for file in files if file])
    print(batch["status"], batch["request_counts"], batch["errors"] or "")
    await nc.close()
    return results


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_bytes(asyncio.run(main(source.read_bytes())))
