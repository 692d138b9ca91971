"""Tensor parallelism: one model in several processes of a machine, each with a part of each layer.

This process is rank 0. It schedules, samples and talks; the others follow: they are told what each
step computes, through a pipe of their own, and compute the same step over their part of the weights
and of the KV heads. Which part is whose is the architecture's plan in transformers (`tp_plan`).

Nobody waits for a rank that is gone. A follower ends when its pipe does, however this process
ended; when a follower ends, or a step fails anywhere, the whole group is lost.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import BinaryIO, cast

import msgpack
import structlog
import torch
from torch import distributed
from transformers import PreTrainedModel

from gpu_worker.engine import DeviceLost
from gpu_worker.engines import memory
from gpu_worker.engines.paged.run import Run, Slice, Table, Window

FOLLOWER = "gpu_worker.engines.paged.follower"
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # ranks read their weights at different speeds
JOIN_NAP_SECONDS = 0.02
END_SECONDS = 10.0  # for a follower to end by itself
log = structlog.get_logger()


@dataclass(frozen=True)
class Shape:
    """What all ranks of a group have in common; they meet in the directory `place`."""

    size: int
    device: str
    threads: int
    place: Path


class Group:
    """This process and its followers. All methods but `start` are for the engine's thread."""

    def __init__(self, followers: Sequence["Process"] = (), place: Path | None = None) -> None:
        self._followers, self._place = followers, place

    @classmethod
    def start(cls, directory: Path, device: torch.device, size: int) -> "Group":
        """Start `size` - 1 followers that load the model, and join them; CPU threads are divided.

        The caller loads the same model next: loading is one computation of all ranks.
        """
        if size == 1:
            return cls()
        threads = max(1, torch.get_num_threads() // size)
        torch.set_num_threads(threads)
        place = Path(mkdtemp(prefix="millstream-ranks-"))  # files: no port for others to talk to
        shape = Shape(size, device.type, threads, place)
        group = cls([Process(rank, directory, shape) for rank in range(1, size)], place)
        with ExitStack() as stack:
            stack.callback(group.close)
            group._join(shape)
            stack.pop_all()
        return group

    def _join(self, shape: Shape) -> None:
        while not all(_ready(shape.place, each.rank).exists() for each in self._followers):
            self.check()
            time.sleep(JOIN_NAP_SECONDS)
        join(shape.place, 0, shape.size, shape.device)

    @property
    def size(self) -> int:
        return len(self._followers) + 1

    @property
    def lost(self) -> str:
        """Which follower is gone; empty while there are all. For any thread."""
        return next((each.end for each in self._followers if each.end), "")

    def check(self) -> None:
        """Raise `DeviceLost` once a follower is gone: what was computed since is worth nothing."""
        if self.lost:
            raise DeviceLost(self.lost)

    def allot(self, blocks: Mapping[Window, int]) -> None:
        """Have every follower make KV pools of so many blocks, in place of those it has."""
        self._tell("allot", list(blocks.items()))

    def zero(self, blocks: Mapping[Window, list[int]]) -> None:
        """Have every follower clear blocks."""
        if blocks:
            self._tell("zero", list(blocks.items()))

    def compute(self, slices: Sequence[Slice]) -> None:
        """Have every follower compute a step; this rank must compute it as well."""
        if self._followers:
            self._tell("compute", [_packed(piece) for piece in slices])

    def least_spare(self, model: PreTrainedModel, memory_bytes: int | None) -> int:
        """What weights leave of the memory of the rank that has least. See `spare_bytes`."""
        self._tell("least_spare", memory_bytes)
        return least_spare(model, memory_bytes, self.size)

    def close(self) -> None:
        """End the followers and leave the group. Idempotent."""
        for follower in self._followers:
            follower.end_soon()
        for follower in self._followers:
            follower.wait()
        if self._followers and distributed.is_initialized():
            distributed.destroy_process_group()
        if self._place:
            rmtree(self._place, ignore_errors=True)
        self._followers, self._place = (), None

    def _tell(self, name: str, *about: object) -> None:
        record = msgpack.packb([name, *about]) if self._followers else b""
        for follower in self._followers:
            follower.tell(record)


class Process:
    """A follower's process, watched from its start to its end.

    It gets what `torchrun` would give it, so the libraries below find their rank and device.
    """

    def __init__(self, rank: int, directory: Path, shape: Shape) -> None:
        self.rank, self.end = rank, ""
        command = [sys.executable, "-m", FOLLOWER, str(directory), shape.device, str(shape.place)]
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": shape.size}
        given = {**ranks, "OMP_NUM_THREADS": shape.threads}
        environment = {**os.environ, **{name: str(value) for name, value in given.items()}}
        # nobody else can write to the pipe, and the other followers do not hold it open
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, bufsize=0)
        self._pipe = cast(BinaryIO, self._process.stdin)
        self._ending = False
        threading.Thread(target=self._watch, name=f"rank-{rank}", daemon=True).start()

    def tell(self, record: bytes) -> None:
        """Raises `DeviceLost` if nobody listens any more."""
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._pipe.write(rest) :]
        except OSError as error:
            raise DeviceLost(f"rank {self.rank} listens no more: {error}") from error

    def end_soon(self) -> None:
        """Let it end; nothing that it does from now on is an error."""
        self._ending = True
        self._pipe.close()

    def wait(self) -> None:
        """Until it has ended; one that does not is killed."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        status = self._process.wait()
        if not self._ending:
            self.end = f"rank {self.rank} of tensor parallelism ended with status {status}"
            log.error("rank_lost", rank=self.rank, status=status)
            abort()


def join(place: Path, rank: int, size: int, device: str) -> None:
    """Become a rank of a group: this process is in no other. Waits for all of them."""
    # gloo's sockets, whose peers are not asked who they are, listen to this machine only
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _ready(place, rank).touch()
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(
        backend,
        init_method=f"file://{place}/store",
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def abort() -> None:
    """End collectives that wait for a rank that is gone: NCCL's do not notice."""
    if distributed.is_initialized() and distributed.group.WORLD is not None:
        distributed.group.WORLD.abort()


def _ready(place: Path, rank: int) -> Path:
    """A file that is there once a rank is about to join."""
    return place / f"rank-{rank}"


def least_spare(model: PreTrainedModel, memory_bytes: int | None, size: int) -> int:
    """The least `spare_bytes` of all ranks, who must all ask."""
    spare = torch.tensor(spare_bytes(model, memory_bytes, size))
    if size > 1:
        distributed.all_reduce(spare, distributed.ReduceOp.MIN)
    return int(spare)


def spare_bytes(model: PreTrainedModel, memory_bytes: int | None, size: int) -> int:
    """What the weights leave for KV and steps on this rank: of its part of `memory_bytes`, or of
    the memory that is free, which ranks on a CPU share."""
    if memory_bytes is not None:
        return memory_bytes // size - memory.held_bytes(model)
    free = memory.spare_bytes(model.device)
    return free // size if model.device.type == "cpu" else free


def _packed(piece: Slice) -> list[object]:
    """What a follower must know of a slice. The tables are whole each time: it keeps no state."""
    tables = [(window, table.blocks) for window, table in piece.run.tables.items()]
    return [piece.tokens, piece.start, piece.samples, tables]


@dataclass(frozen=True)
class Told(Slice):
    """A slice as a follower knows it: its run has no tokens, only it has."""

    told: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.told


def unpacked(record: tuple[list[int], int, bool, list[tuple[Window, list[int]]]]) -> Slice:
    """A slice as `compute` sent it."""
    tokens, start, samples, tables = record
    run = Run("", [], tables={window: Table(blocks) for window, blocks in tables})
    return Told(run, start, len(tokens), samples, tokens)
