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

from gpu_worker.engines import device_memory
from gpu_worker.engines.engine import DeviceLost
from gpu_worker.engines.paged.batch.sequence_state import (
    BlockTable,
    SequenceSlice,
    SequenceState,
    SlidingWindow,
)

RANK_MODULE = "gpu_worker.engines.paged.tensor_parallel_rank"
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # ranks read their weights at different speeds
JOIN_POLL_SECONDS = 0.02
EXIT_TIMEOUT_SECONDS = 10.0  # for a follower to end by itself
log = structlog.get_logger()


@dataclass(frozen=True)
class GroupSpec:
    """What all ranks of a group have in common; they meet in the directory `place`."""

    world_size: int
    device: str
    threads: int
    rendezvous: Path


class TensorParallelGroup:
    """This process and its followers. All methods but `start` are for the engine's thread."""

    def __init__(self, followers: Sequence["RankProcess"] = (), place: Path | None = None) -> None:
        self._ranks, self._rendezvous = followers, place

    @classmethod
    def start(cls, directory: Path, device: torch.device, size: int) -> "TensorParallelGroup":
        """Start `size` - 1 followers that load the model, and join them; CPU threads are divided.

        The caller loads the same model next: loading is one computation of all ranks.
        """
        if size == 1:
            return cls()
        threads = max(1, torch.get_num_threads() // size)
        torch.set_num_threads(threads)
        place = Path(mkdtemp(prefix="millstream-ranks-"))  # files: no port for others to talk to
        shape = GroupSpec(size, device.type, threads, place)
        group = cls([RankProcess(rank, directory, shape) for rank in range(1, size)], place)
        with ExitStack() as stack:
            stack.callback(group.close)
            group._join(shape)
            stack.pop_all()
        return group

    def _join(self, shape: GroupSpec) -> None:
        while not all(_ready_file(shape.rendezvous, each.rank).exists() for each in self._ranks):
            self.raise_if_lost()
            time.sleep(JOIN_POLL_SECONDS)
        join_group(shape.rendezvous, 0, shape.world_size, shape.device)

    @property
    def world_size(self) -> int:
        return len(self._ranks) + 1

    @property
    def lost_reason(self) -> str:
        """Which follower is gone; empty while there are all. For any thread."""
        return next((each.exit_reason for each in self._ranks if each.exit_reason), "")

    def raise_if_lost(self) -> None:
        """Raise `DeviceLost` once a follower is gone: what was computed since is worth nothing."""
        if self.lost_reason:
            raise DeviceLost(self.lost_reason)

    def allocate_kv(self, blocks: Mapping[SlidingWindow, int]) -> None:
        """Have every follower make KV pools of so many blocks, in place of those it has."""
        self._broadcast("allot", list(blocks.items()))

    def zero_blocks(self, blocks: Mapping[SlidingWindow, list[int]]) -> None:
        """Have every follower clear blocks."""
        if blocks:
            self._broadcast("zero", list(blocks.items()))

    def compute_step(self, slices: Sequence[SequenceSlice]) -> None:
        """Have every follower compute a step; this rank must compute it as well."""
        if self._ranks:
            self._broadcast("compute", [_pack_slice(piece) for piece in slices])

    def min_spare_bytes(self, model: PreTrainedModel, memory_bytes: int | None) -> int:
        """What weights leave of the memory of the rank that has least. See `spare_bytes`."""
        self._broadcast("least_spare", memory_bytes)
        return min_spare_bytes(model, memory_bytes, self.world_size)

    def close(self) -> None:
        """End the followers and leave the group. Idempotent."""
        for follower in self._ranks:
            follower.request_exit()
        for follower in self._ranks:
            follower.wait()
        if self._ranks and distributed.is_initialized():
            distributed.destroy_process_group()
        if self._rendezvous:
            rmtree(self._rendezvous, ignore_errors=True)
        self._ranks, self._rendezvous = (), None

    def _broadcast(self, name: str, *about: object) -> None:
        record = msgpack.packb([name, *about]) if self._ranks else b""
        for follower in self._ranks:
            follower.send(record)


class RankProcess:
    """A follower's process, watched from its start to its end.

    It gets what `torchrun` would give it, so the libraries below find their rank and device.
    """

    def __init__(self, rank: int, directory: Path, shape: GroupSpec) -> None:
        self.rank, self.exit_reason = rank, ""
        command = [
            sys.executable,
            "-m",
            RANK_MODULE,
            str(directory),
            shape.device,
            str(shape.rendezvous),
        ]
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": shape.world_size}
        given = {**ranks, "OMP_NUM_THREADS": shape.threads}
        environment = {**os.environ, **{name: str(value) for name, value in given.items()}}
        # nobody else can write to the pipe, and the other followers do not hold it open
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, bufsize=0)
        self._pipe = cast(BinaryIO, self._process.stdin)
        self._is_closing = False
        threading.Thread(target=self._watch, name=f"rank-{rank}", daemon=True).start()

    def send(self, record: bytes) -> None:
        """Raises `DeviceLost` if nobody listens any more."""
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._pipe.write(rest) :]
        except OSError as error:
            raise DeviceLost(f"rank {self.rank} listens no more: {error}") from error

    def request_exit(self) -> None:
        """Let it end; nothing that it does from now on is an error."""
        self._is_closing = True
        self._pipe.close()

    def wait(self) -> None:
        """Until it has ended; one that does not is killed."""
        try:
            self._process.wait(EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        status = self._process.wait()
        if not self._is_closing:
            self.exit_reason = f"rank {self.rank} of tensor parallelism ended with status {status}"
            log.error("rank_lost", rank=self.rank, status=status)
            abort_collectives()


def join_group(place: Path, rank: int, size: int, device: str) -> None:
    """Become a rank of a group: this process is in no other. Waits for all of them."""
    # gloo's sockets, whose peers are not asked who they are, listen to this machine only
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _ready_file(place, rank).touch()
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


def abort_collectives() -> None:
    """End collectives that wait for a rank that is gone: NCCL's do not notice."""
    if distributed.is_initialized() and distributed.group.WORLD is not None:
        distributed.group.WORLD.abort()


def _ready_file(place: Path, rank: int) -> Path:
    """A file that is there once a rank is about to join."""
    return place / f"rank-{rank}"


def min_spare_bytes(model: PreTrainedModel, memory_bytes: int | None, size: int) -> int:
    """The least `spare_bytes` of all ranks, who must all ask."""
    spare = torch.tensor(rank_spare_bytes(model, memory_bytes, size))
    if size > 1:
        distributed.all_reduce(spare, distributed.ReduceOp.MIN)
    return int(spare)


def rank_spare_bytes(model: PreTrainedModel, memory_bytes: int | None, size: int) -> int:
    """What the weights leave for KV and steps on this rank: of its part of `memory_bytes`, or of
    the memory that is free, which ranks on a CPU share."""
    if memory_bytes is not None:
        return memory_bytes // size - device_memory.model_bytes(model)
    free = device_memory.kv_budget_bytes(model.device)
    return free // size if model.device.type == "cpu" else free


def _pack_slice(piece: SequenceSlice) -> list[object]:
    """What a follower must know of a slice. The tables are whole each time: it keeps no state."""
    tables = [(window, table.blocks) for window, table in piece.state.block_tables.items()]
    return [piece.tokens, piece.start, piece.is_sampled, tables]


@dataclass(frozen=True)
class ReceivedSlice(SequenceSlice):
    """A slice as a follower knows it: its run has no tokens, only it has."""

    received_tokens: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.received_tokens


def unpack_slice(
    record: tuple[list[int], int, bool, list[tuple[SlidingWindow, list[int]]]],
) -> SequenceSlice:
    """A slice as `compute` sent it."""
    tokens, start, samples, tables = record
    run = SequenceState(
        "", [], block_tables={window: BlockTable(blocks) for window, blocks in tables}
    )
    return ReceivedSlice(run, start, len(tokens), samples, tokens)
