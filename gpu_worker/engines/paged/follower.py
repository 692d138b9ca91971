"""A follower of tensor parallelism, started by `parallel.Process`: it computes what it is told."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from shutil import rmtree

import msgpack
import torch

from gpu_worker.engines.paged import model as models
from gpu_worker.engines.paged import parallel
from gpu_worker.engines.paged.forward import ForwardPass
from gpu_worker.engines.paged.run import Window


class Follower:
    """One rank's part of a model and of its KV. Its methods are what `parallel.Group` tells."""

    def __init__(self, loaded: models.Loaded, size: int) -> None:
        self._loaded, self._size = loaded, size
        self._forward: ForwardPass | None = None
        self.does: Mapping[str, Callable[..., object]] = {
            "allot": self.allot,
            "zero": self.zero,
            "compute": self.compute,
            "least_spare": self.least_spare,
        }

    def allot(self, blocks: list[tuple[Window, int]]) -> None:
        if self._forward:
            self._forward.close()
        self._forward = ForwardPass(self._loaded, dict(blocks))

    def zero(self, blocks: list[tuple[Window, list[int]]]) -> None:
        assert self._forward, "blocks were not allotted"
        self._forward.attention.zero(dict(blocks))

    def compute(
        self, slices: list[tuple[list[int], int, bool, list[tuple[Window, list[int]]]]]
    ) -> None:
        assert self._forward, "blocks were not allotted"
        plan = self._forward.plan([parallel.unpacked(each) for each in slices])
        self._forward.prepared(plan, replay=False)()

    def least_spare(self, memory_bytes: int | None) -> None:
        parallel.least_spare(self._loaded.model, memory_bytes, self._size)


def main() -> None:
    """Until the pipe ends; an error ends the process, and with it the group."""
    directory, device, place = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told: SimpleQueue[list[object]] = SimpleQueue()
    threading.Thread(target=_listen, args=[told, place], daemon=True).start()
    parallel.join(Path(place), rank, size, device)
    follower = Follower(models.load(Path(directory), device, size), size)
    with torch.inference_mode():
        while True:
            name, *about = told.get()
            follower.does[str(name)](*about)


def _listen(told: "SimpleQueue[list[object]]", place: str) -> None:
    """Hand on what rank 0 says; when it is gone end at once, even from a collective."""
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        for record in msgpack.Unpacker(pipe, strict_map_key=False):
            told.put(record)
    rmtree(place, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    # They may go to the whole process group; the worker drains, and its followers with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main()
