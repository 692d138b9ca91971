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

from gpu_worker.engines.paged import model_loader as models
from gpu_worker.engines.paged import tensor_parallel
from gpu_worker.engines.paged.batch.sequence_state import SlidingWindow
from gpu_worker.engines.paged.model_runner import ModelRunner


class TensorParallelRank:
    """One rank's part of a model and of its KV. Its methods are what `parallel.Group` tells."""

    def __init__(self, loaded: models.LoadedCausalLM, size: int) -> None:
        self._loaded, self._world_size = loaded, size
        self._runner: ModelRunner | None = None
        self.handlers: Mapping[str, Callable[..., object]] = {
            "allot": self.allocate_kv,
            "zero": self.zero_blocks,
            "compute": self.compute_step,
            "least_spare": self.min_spare_bytes,
        }

    def allocate_kv(self, blocks: list[tuple[SlidingWindow, int]]) -> None:
        if self._runner:
            self._runner.close()
        self._runner = ModelRunner(self._loaded, dict(blocks))

    def zero_blocks(self, blocks: list[tuple[SlidingWindow, list[int]]]) -> None:
        assert self._runner, "blocks were not allotted"
        self._runner.attention.zero_blocks(dict(blocks))

    def compute_step(
        self, slices: list[tuple[list[int], int, bool, list[tuple[SlidingWindow, list[int]]]]]
    ) -> None:
        assert self._runner, "blocks were not allotted"
        plan = self._runner.make_inputs([tensor_parallel.unpack_slice(each) for each in slices])
        self._runner.prepare_forward(plan, replay=False)()

    def min_spare_bytes(self, memory_bytes: int | None) -> None:
        tensor_parallel.min_spare_bytes(self._loaded.model, memory_bytes, self._world_size)


def main() -> None:
    """Until the pipe ends; an error ends the process, and with it the group."""
    directory, device, place = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told: SimpleQueue[list[object]] = SimpleQueue()
    threading.Thread(target=_listen, args=[told, place], daemon=True).start()
    tensor_parallel.join_group(Path(place), rank, size, device)
    follower = TensorParallelRank(models.load_model(Path(directory), device, size), size)
    with torch.inference_mode():
        while True:
            name, *about = told.get()
            follower.handlers[str(name)](*about)


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
