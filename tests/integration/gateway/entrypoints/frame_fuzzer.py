"""Mutated frames against a gateway.

python -m tests.integration.gateway.entrypoints.frame_fuzzer [FRAMES] [SEED]
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop

from api.schemas.parsing import Encoding, decode, find_frame_id
from millstream import log_config
from streams.errors import BadRequest
from tests.integration.gateway.entrypoints import frame_mutations
from tests.support.accounts_server import AccountsServer
from tests.support.eventually import eventually
from tests.support.gateways import JSON, MSGPACK, RunningGateway, cell, tenants

BATCH_FRAMES = 200  # frames between two looks at the answers
UNLIMITED = {"frames_per_second": 10**9, "max_queued": 100_000}


@dataclass
class Findings:
    """What a gateway said to some frames, no two of which have the same id."""

    frames: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    open: set[str] = field(default_factory=set)

    @property
    def answered(self) -> int:
        """Frames that were taken or refused."""
        return self.accepted + self.refused.total()

    @property
    def faults(self) -> int:
        """Answers by which the gateway says that it failed."""
        return self.refused["internal_error"] + self.failed["internal_error"]

    def record(self, frame: dict[str, Any]) -> None:
        kind, id = frame["type"], frame.get("id")
        if kind == "accepted":
            self.accepted += 1
            self.open.add(frame["id"])
        elif kind in ("done", "result", "error") and id in self.open:
            self.open.remove(id)
            self.failed.update([frame["code"]] if kind == "error" else [])
        elif kind == "error":
            self.refused[frame["code"]] += 1


async def fuzz(gateway: RunningGateway, subprotocol: str, seed: int, frames: int) -> Findings:
    """Send so many frames on one socket, which must live to its end and answer each."""
    found, packed = Findings(), subprotocol == MSGPACK
    mutated = _named_once(
        frame_mutations.mutated_frames(seed, packed=packed), "msgpack" if packed else "json"
    )
    # it must go on reading while it writes: who does not is cut
    async with gateway.socket(subprotocol, max_size=None, max_queue=None) as socket:
        while found.frames < frames:
            batch = list(islice(mutated, min(BATCH_FRAMES, frames - found.frames)))
            found.frames += len(batch)
            for data in batch:
                await socket.connection.send(data, text=not packed)
            while found.answered < found.frames:
                found.record(await socket.receive(60))
        while found.open:
            found.record(await socket.receive(60))
        await socket.generate("still here", max_tokens=1)
        await socket.receive_rest("still here")
    return found


def _named_once(frames: Iterator[bytes], encoding: Encoding) -> Iterator[bytes]:
    """Without those whose id was there before: which of the two is answered could not be told."""
    seen: set[str] = {"still here"}
    for data in frames:
        try:
            id = find_frame_id(decode(data, encoding))
        except BadRequest:
            id = None
        if id not in seen:
            yield data
            seen.update([id] if id else [])


async def _main(frames: int, seed: int) -> None:
    log_config.configure("error")
    with tempfile.TemporaryDirectory() as home:
        broker = AccountsServer(Path(home))
        try:
            limits = tenants(**UNLIMITED)
            async with cell(broker.url, tenants=limits, grace_seconds=0) as (gateway,):
                for subprotocol in (JSON, MSGPACK):
                    began = time.perf_counter()
                    found = await fuzz(gateway, subprotocol, seed, frames // 2)
                    seconds = time.perf_counter() - began
                    print(f"{subprotocol}: {found.frames} frames in {seconds:.0f} s,", end=" ")
                    print(
                        f"{found.accepted} accepted, refused: {json.dumps(found.refused)},", end=" "
                    )
                    print(f"failed: {json.dumps(found.failed)}", flush=True)
                    assert not found.faults, "see the log"

                async def forgotten() -> bool:
                    return await gateway.followed_requests() == 0

                await eventually(forgotten, 60)
        finally:
            broker.kill()
        assert broker.violations() == []


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    uvloop.run(_main(words[0] if words else 1_000_000, words[1] if words[1:] else 1))
