"""Mutated frames against a gateway: `python -m tests.integration.fuzzing [FRAMES] [SEED]`."""

import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop

from millstream import logs
from tests.broker import NatsServer
from tests.eventually import eventually
from tests.integration import mutants
from tests.integration.gateways import JSON, MSGPACK, Gateway, Socket, cell, tenants

AT_ONCE = 200  # frames between two looks at the answers
UNBOUND = {"frames_per_second": 10**9, "max_queued": 100_000}


@dataclass
class Findings:
    """What a gateway said to some frames."""

    frames: int = 0
    accepted: int = 0
    ended: int = 0
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def answered(self) -> int:
        """Frames that were taken or refused; and accepted ones that ended in an error."""
        return self.accepted + self.codes.total()

    def take(self, frame: dict[str, Any]) -> None:
        kind = frame["type"]
        if kind == "accepted":
            self.accepted += 1
        elif kind == "error":
            self.codes[frame["code"]] += 1
        elif kind in ("done", "result"):
            self.ended += 1


async def fuzz(gateway: Gateway, subprotocol: str, seed: int, frames: int) -> Findings:
    """Send so many frames on one socket, which must live to its end and answer each."""
    found, packed = Findings(), subprotocol == MSGPACK
    mutated = mutants.frames(seed, packed=packed)
    # it must go on reading while it writes: who does not is cut
    async with gateway.socket(subprotocol, max_size=None, max_queue=None) as socket:
        while found.frames < frames:
            batch = list(islice(mutated, min(AT_ONCE, frames - found.frames)))
            found.frames += len(batch)
            for data in batch:
                await socket.connection.send(data, text=not packed)
            while found.answered < found.frames:
                found.take(await socket.receive(30))
        await _settled(socket, found)
    return found


async def _settled(socket: Socket, found: Findings) -> None:
    """Still a socket like any other, after all that."""
    await socket.generate("still here", max_tokens=1)
    while True:
        frame = await socket.receive(30)
        found.take(frame)
        if frame.get("id") == "still here" and frame["type"] == "done":
            return


async def _main(frames: int, seed: int) -> None:
    logs.configure("error")
    with tempfile.TemporaryDirectory() as home:
        broker = NatsServer(Path(home))
        try:
            limits = tenants(**UNBOUND)
            async with cell(broker.url, tenants=limits, grace_seconds=0) as (gateway,):
                for subprotocol in (JSON, MSGPACK):
                    began = time.perf_counter()
                    found = await fuzz(gateway, subprotocol, seed, frames // 2)
                    seconds = time.perf_counter() - began
                    print(f"{subprotocol}: {found.frames} frames in {seconds:.0f} s,", end=" ")
                    print(f"{found.accepted} accepted, refused: {json.dumps(found.codes)}")
                    assert not found.codes["internal_error"], "see the log"

                async def forgotten() -> bool:
                    return await gateway.followed() == 0

                await eventually(forgotten, 60)
        finally:
            broker.kill()


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    uvloop.run(_main(words[0] if words else 1_000_000, words[1] if words[1:] else 1))
