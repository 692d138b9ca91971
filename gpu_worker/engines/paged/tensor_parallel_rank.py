"""The process of a tensor parallel rank other than 0: it computes what rank 0 sends.

`tensor_parallel.RankProcess` starts it.
"""

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
    """One rank's part of a model and of its KV, in a process other than rank 0's.

    `handlers` holds the methods by the names that rank 0 sends; see `TensorParallelGroup`.
    """

    def __init__(self, loaded: models.LoadedCausalLM, world_size: int) -> None:
        self._loaded, self._world_size = loaded, world_size
        self._runner: ModelRunner | None = None
        self.handlers: Mapping[str, Callable[..., object]] = {
            "allocate_kv": self.allocate_kv,
            "zero_blocks": self.zero_blocks,
            "compute_step": self.compute_step,
            "min_spare_bytes": self.min_spare_bytes,
        }

    def allocate_kv(self, blocks: list[tuple[SlidingWindow, int]]) -> None:
        """Allocate this rank's KV in place of what it has; `blocks` pairs a window with a count."""
        if self._runner:
            self._runner.close()
        self._runner = ModelRunner(self._loaded, dict(blocks))

    def zero_blocks(self, blocks: list[tuple[SlidingWindow, list[int]]]) -> None:
        """Zero the KV of blocks, whose numbers come by window. KV must have been allocated."""
        assert self._runner, "no KV was allocated"
        self._runner.attention.zero_blocks(dict(blocks))

    def compute_step(
        self, records: list[tuple[list[int], int, bool, list[tuple[SlidingWindow, list[int]]]]]
    ) -> None:
        """Compute this rank's part of a step over the slices in `records`; see `unpack_slice`.

        The logits are dropped, since rank 0 samples. KV must have been allocated.
        """
        assert self._runner, "no KV was allocated"
        inputs = self._runner.make_inputs(
            [tensor_parallel.unpack_slice(record) for record in records]
        )
        self._runner.prepare_forward(inputs, replay=False)()

    def min_spare_bytes(self, memory_bytes: int | None) -> None:
        """Take part in the collective operation that finds the least spare memory of all ranks.

        Rank 0 uses the result; here it is dropped.
        """
        tensor_parallel.min_spare_bytes(self._loaded.model, memory_bytes, self._world_size)


def main() -> None:
    """Run this process as a rank: join the group, load the model, and do what rank 0 sends.

    Ends the process with status 0 as soon as rank 0 closes the pipe. An error ends the process with
    a traceback, and rank 0 then treats the whole group as lost.
    """
    directory, device, rendezvous = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    messages: SimpleQueue[list[object]] = SimpleQueue()
    threading.Thread(target=_listen, args=[messages, rendezvous], daemon=True).start()
    tensor_parallel.join_group(Path(rendezvous), rank, world_size, device)
    this_rank = TensorParallelRank(
        models.load_model(Path(directory), device, world_size), world_size
    )
    with torch.inference_mode():
        while True:
            name, *arguments = messages.get()
            this_rank.handlers[str(name)](*arguments)


def _listen(messages: "SimpleQueue[list[object]]", rendezvous: str) -> None:
    """Queue the messages of rank 0; when the pipe closes end at once, even inside a collective."""
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        for record in msgpack.Unpacker(pipe, strict_map_key=False):
            messages.put(record)
    rmtree(rendezvous, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    # Signals may go to the whole process group: the worker drains, and its ranks end with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main()
