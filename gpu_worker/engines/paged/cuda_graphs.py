"""CUDA graphs of decode steps: padded to a few batch sizes, each recorded once and replayed.

A small model's decode step is hundreds of kernels of microseconds, which the host cannot launch as
fast as the device runs them; a CUDA graph is one launch. It replays on the same memory, and the
host does not take part in between: `DecodeInputBuffers` is that memory.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from gpu_worker.engines.paged.batch.decode_inputs import DecodeInputBuffers, DecodeInputs
from gpu_worker.engines.paged.batch.sequence_state import SequenceSlice

Launch = Callable[[], None]
Recorder = Callable[[Launch], Launch]  # runs a function, and returns one that repeats its work

SMALL_SIZES, SIZE_STEP = (1, 2, 4), 8


def capture_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes at which decode steps are recorded as CUDA graphs, in ascending order.

    They are 1, 2, 4, 8, 16, 24, … below `max_rows`, and `max_rows` itself. A step that is padded to
    the next of these sizes gets at most seven rows of padding; up to size 8 padding is less than
    half of the padded step.
    """
    return sorted(
        {size for size in (*SMALL_SIZES, *range(SIZE_STEP, max_rows, SIZE_STEP)) if size < max_rows}
        | {max_rows}
    )


def choose_recorder(device: torch.device) -> Recorder:
    """Return a device's recorder: it runs a function once and returns one that repeats its work.

    On a GPU the returned function replays a recorded CUDA graph. On a CPU it is the given function
    itself, which computes everything again.
    """
    return _CudaGraphRecorder(device) if device.type == "cuda" else _recompute


def _recompute(work: Launch) -> Launch:
    work()
    return work


class DecodeGraphs:
    """Runs decode steps of at most `rows` sequences, each padded to one of the `capture_sizes`.

    Each size is recorded as a CUDA graph once and replayed from then on. For each step the caller
    first calls `fill_inputs`, then `run`. `forward` must turn a `DecodeInputs` of n rows into
    logits `[n, vocabulary]`, and must not make the host wait for the device.
    """

    def __init__(
        self,
        forward: Callable[[DecodeInputs], Tensor],
        buffers: DecodeInputBuffers,
        rows: int,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self._forward, self._buffers = forward, buffers
        self._sizes = capture_sizes(rows)
        self._shape, self._device = (rows, vocabulary), device
        self._recorder = choose_recorder(device)
        self._recorded: dict[int, Launch] = {}

    def capture(self) -> None:
        """Record a decode step of every batch size, so that none has to be recorded while serving.

        The largest size is recorded first, because the others then fit into the memory that it
        took. Overwrites the input buffers with padding. Raises `RuntimeError` if the model cannot
        be recorded.
        """
        for size in reversed(self._sizes):
            self._buffers.fill([], size)
            self._capture_or_replay(size)

    def fill_inputs(self, slices: Sequence[SequenceSlice]) -> None:
        """Write at most `rows` slices of one token each to the buffers that `run` reads."""
        self._buffers.fill(slices, self._padded_size(len(slices)))

    def run(self, count: int) -> Tensor:
        """Compute the `count` slices that `fill_inputs` wrote, and return their logits.

        The logits are float32 `[count, vocabulary]`, in the order of the slices, in a buffer that
        the next `run` overwrites. A batch size that has no recording yet is recorded in this call,
        which raises `RuntimeError` if the model cannot be recorded.
        """
        self._capture_or_replay(self._padded_size(count))
        return self._logits[:count]

    @cached_property
    def _logits(self) -> Tensor:
        """The output buffer, one for all sizes: a graph's own would be one for each size."""
        return torch.empty(self._shape, dtype=torch.float32, device=self._device)

    def _padded_size(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]

    def _capture_or_replay(self, size: int) -> None:
        if replay := self._recorded.get(size):
            replay()
        else:
            self._recorded[size] = self._recorder(lambda: self._compute(size))

    def _compute(self, size: int) -> None:
        self._logits[:size].copy_(self._forward(self._buffers.inputs(size)))


class _CudaGraphRecorder:
    """Records CUDA graphs that share one memory pool, as only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Launch) -> Launch:
        work()  # compiles kernels and makes handles, which must not happen while recording
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads have engines of their own, and may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        replay: Launch = graph.replay
        return replay
