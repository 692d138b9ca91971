"""Tensor parallelism: one model in several processes of a machine, each with a part of each layer.

This process is rank 0, which schedules and samples. It sends each step to every other rank through
a pipe, and they compute the same step over their part of the weights and of the KV heads. Which
part belongs to which rank is the architecture's plan in transformers (`tp_plan`).

No process waits for a rank that is gone. The other ranks end when their pipe closes, however this
process ended; when one of them ends, or a step fails anywhere, the whole group is lost.
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
EXIT_TIMEOUT_SECONDS = 10.0  # for a rank to end by itself before it is killed
log = structlog.get_logger()


@dataclass(frozen=True)
class GroupSpec:
    """The settings that all ranks of a tensor parallel group share.

    `world_size` is the number of ranks, `device` a device type ("cpu" or "cuda"), `threads` the CPU
    threads of each rank, and `rendezvous` the directory by which the ranks find each other.
    """

    world_size: int
    device: str
    threads: int
    rendezvous: Path


class TensorParallelGroup:
    """This process, which is rank 0, and the processes of the other ranks that it started.

    A group without other ranks sends nothing. When one rank ends, the whole group is lost. All
    methods but `start` must be called from the engine's thread; `lost_reason` may be read from any.
    """

    def __init__(self, ranks: Sequence["RankProcess"] = (), rendezvous: Path | None = None) -> None:
        self._ranks, self._rendezvous = ranks, rendezvous

    @classmethod
    def start(cls, directory: Path, device: torch.device, world_size: int) -> "TensorParallelGroup":
        """Start `world_size` - 1 processes that load the model, and wait until all have joined.

        With a `world_size` of 1 it starts none and returns at once. torch's CPU threads are divided
        among the ranks, this process included. The caller must load the same model next, because
        loading is a collective operation. Raises `DeviceLost` if a rank ends before it has joined;
        the others are then ended, too.
        """
        if world_size == 1:
            return cls()
        threads = max(1, torch.get_num_threads() // world_size)
        torch.set_num_threads(threads)
        # A directory instead of a port: other users of the machine cannot talk to it.
        rendezvous = Path(mkdtemp(prefix="millstream-ranks-"))
        spec = GroupSpec(world_size, device.type, threads, rendezvous)
        group = cls(
            [RankProcess(rank, directory, spec) for rank in range(1, world_size)], rendezvous
        )
        with ExitStack() as stack:
            stack.callback(group.close)
            group._join(spec)
            stack.pop_all()
        return group

    def _join(self, spec: GroupSpec) -> None:
        while not all(_ready_file(spec.rendezvous, rank.rank).exists() for rank in self._ranks):
            self.raise_if_lost()
            time.sleep(JOIN_POLL_SECONDS)
        join_group(spec.rendezvous, 0, spec.world_size, spec.device)

    @property
    def world_size(self) -> int:
        """The number of ranks in the group, this process included."""
        return len(self._ranks) + 1

    @property
    def lost_reason(self) -> str:
        """The sentence that says which rank has ended and how; empty while all ranks run.

        Ranks that `close` has ended do not count. Safe to read from any thread.
        """
        return next(
            (rank.exit_reason for rank in self._ranks if rank.exit_reason),
            "",
        )

    def raise_if_lost(self) -> None:
        """Raise `DeviceLost` if a rank has ended: results since then are not to be trusted."""
        if self.lost_reason:
            raise DeviceLost(self.lost_reason)

    def allocate_kv(self, blocks: Mapping[SlidingWindow, int]) -> None:
        """Tell every other rank to allocate KV of so many blocks by window, replacing what it has.

        Returns once the message is written, before the ranks have done it. Raises `DeviceLost` if a
        rank no longer reads its pipe. This rank's own KV is left to the caller.
        """
        self._broadcast("allocate_kv", list(blocks.items()))

    def zero_blocks(self, blocks: Mapping[SlidingWindow, list[int]]) -> None:
        """Tell every other rank to zero these blocks of KV.

        `blocks` has the numbers of blocks by their layers' sliding window in tokens (None: full
        attention). Returns once the message is written; sends nothing if `blocks` is empty. Raises
        `DeviceLost` if a rank has closed its pipe. This rank's own blocks are left to the caller.
        """
        if blocks:
            self._broadcast("zero_blocks", list(blocks.items()))

    def compute_step(self, slices: Sequence[SequenceSlice]) -> None:
        """Tell every other rank to compute a step over these slices, and return once they are told.

        The caller must compute the same step on this rank, because the ranks wait for each other in
        every layer. Raises `DeviceLost` if a rank no longer reads its pipe.
        """
        if self._ranks:
            self._broadcast("compute_step", [_pack_slice(seq_slice) for seq_slice in slices])

    def min_spare_bytes(self, model: PreTrainedModel, memory_bytes: int | None) -> int:
        """Return the least spare memory of all ranks in bytes, as `rank_spare_bytes` computes it.

        Waits until every rank has answered. Raises `DeviceLost` if a rank no longer reads its pipe.
        """
        self._broadcast("min_spare_bytes", memory_bytes)
        return min_spare_bytes(model, memory_bytes, self.world_size)

    def close(self) -> None:
        """End the other ranks and leave the group, which then has this process alone. Idempotent.

        Waits for each rank to end, and kills it after `EXIT_TIMEOUT_SECONDS` (10 s).
        """
        for rank in self._ranks:
            rank.request_exit()
        for rank in self._ranks:
            rank.wait()
        if self._ranks and distributed.is_initialized():
            distributed.destroy_process_group()
        if self._rendezvous:
            rmtree(self._rendezvous, ignore_errors=True)
        self._ranks, self._rendezvous = (), None

    def _broadcast(self, name: str, *arguments: object) -> None:
        record = msgpack.packb([name, *arguments]) if self._ranks else b""
        for rank in self._ranks:
            rank.send(record)


class RankProcess:
    """The process of a rank other than 0, which rank 0 starts and a thread watches until it ends.

    The process has the environment variables that `torchrun` would set, by which libraries find
    their rank and device. `exit_reason` is a sentence that says how the process ended; it is empty
    while the process runs and after an exit that `request_exit` asked for. An unasked exit also
    aborts the collectives of this process.
    """

    def __init__(self, rank: int, directory: Path, spec: GroupSpec) -> None:
        self.rank, self.exit_reason = rank, ""
        command = [
            sys.executable,
            "-m",
            RANK_MODULE,
            str(directory),
            spec.device,
            str(spec.rendezvous),
        ]
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": spec.world_size}
        variables = {**ranks, "OMP_NUM_THREADS": spec.threads}
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        # a pipe: no other process can write to it, and the other ranks do not hold it open
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, bufsize=0)
        self._pipe = cast(BinaryIO, self._process.stdin)
        self._is_closing = False
        threading.Thread(target=self._watch, name=f"rank-{rank}", daemon=True).start()

    def send(self, record: bytes) -> None:
        """Write a message to the rank's pipe, waiting while the pipe is full.

        Raises `DeviceLost` if the rank no longer reads its pipe. There is no reply.
        """
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._pipe.write(rest) :]
        except OSError as error:
            raise DeviceLost(f"rank {self.rank} no longer reads its pipe: {error}") from error

    def request_exit(self) -> None:
        """Close the rank's pipe, at which its process ends, and return without waiting for that.

        From then on the end of the process is not a failure: it sets no `exit_reason`.
        """
        self._is_closing = True
        self._pipe.close()

    def wait(self) -> None:
        """Wait until the process has ended; kill it after `EXIT_TIMEOUT_SECONDS` (10 s)."""
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


def join_group(rendezvous: Path, rank: int, world_size: int, device: str) -> None:
    """Make this process rank `rank` of a process group, and wait until all ranks have joined.

    All ranks must name the same directory `rendezvous`. With the device "cuda" the rank's GPU is
    the one of the same number. torch raises its own error if a rank is missing after
    `COLLECTIVE_TIMEOUT` (10 minutes). A process can be in one group only.
    """
    # gloo's sockets do not authenticate their peers, so they listen to this machine only
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _ready_file(rendezvous, rank).touch()
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(
        backend,
        init_method=f"file://{rendezvous}/store",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def abort_collectives() -> None:
    """Abort the collectives of this process that wait for a rank that has ended.

    NCCL's would wait on, since NCCL does not notice that a rank is gone. Does nothing if this
    process is in no group.
    """
    if distributed.is_initialized() and distributed.group.WORLD is not None:
        distributed.group.WORLD.abort()


def _ready_file(rendezvous: Path, rank: int) -> Path:
    """Return the path of the file that a rank creates when it is about to join."""
    return rendezvous / f"rank-{rank}"


def min_spare_bytes(model: PreTrainedModel, memory_bytes: int | None, world_size: int) -> int:
    """Return the least `rank_spare_bytes` of all ranks.

    A collective operation: every rank must call it, and each call waits for the others.
    """
    spare = torch.tensor(rank_spare_bytes(model, memory_bytes, world_size))
    if world_size > 1:
        distributed.all_reduce(spare, distributed.ReduceOp.MIN)
    return int(spare)


def rank_spare_bytes(model: PreTrainedModel, memory_bytes: int | None, world_size: int) -> int:
    """Return the bytes that are left for KV and steps on this rank, after the weights.

    With `memory_bytes` they are the rank's equal part of that, less its weights: negative if those
    do not fit. Without, they are the part of the free memory that a worker may fill; on a CPU the
    ranks divide that part equally.
    """
    if memory_bytes is not None:
        return memory_bytes // world_size - device_memory.model_bytes(model)
    free = device_memory.kv_budget_bytes(model.device)
    return free // world_size if model.device.type == "cpu" else free


def _pack_slice(seq_slice: SequenceSlice) -> list[object]:
    """Return what another rank must know of a slice; it keeps no state, so tables are complete."""
    tables = [(window, table.blocks) for window, table in seq_slice.state.block_tables.items()]
    return [seq_slice.tokens, seq_slice.start, seq_slice.is_sampled, tables]


@dataclass(frozen=True)
class ReceivedSlice(SequenceSlice):
    """A slice on a rank other than 0, made from a message of rank 0.

    The slice has its own token ids, since the state of its sequence has none on this rank.
    """

    received_tokens: list[int]

    @property
    def tokens(self) -> list[int]:
        """The slice's token ids, as they were received."""
        return self.received_tokens


def unpack_slice(
    record: tuple[list[int], int, bool, list[tuple[SlidingWindow, list[int]]]],
) -> SequenceSlice:
    """Return the slice that rank 0 sent as this record; see `TensorParallelGroup.compute_step`."""
    tokens, start, is_sampled, tables = record
    state = SequenceState(
        "", [], block_tables={window: BlockTable(blocks) for window, blocks in tables}
    )
    return ReceivedSlice(state, start, len(tokens), is_sampled, tokens)
