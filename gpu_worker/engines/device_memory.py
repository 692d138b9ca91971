"""Measures the memory of a device: what is free, what a computation takes; gives it back."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# Shares of the free memory that one worker may fill. Other programs use a CPU's memory, and a
# machine runs more than one worker; a GPU's is the worker's but for fragments and libraries.
SHARES = {"cpu": 0.25, "cuda": 0.92}
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "DefaultCPUAllocator")
_RESET_PEAK = "5"  # proc(5), clear_refs
_CGROUP = Path("/sys/fs/cgroup")
_LIBC = ctypes.CDLL(None)


def default_device() -> torch.device:
    """Return the GPU if torch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that could be allocated on the device now.

    For a CPU that is the machine's available memory, or what the container's limit leaves if that
    is less.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _read_fields(Path("/proc/meminfo"))["MemAvailable"] * 1024
    return max(0, min([available, *_cgroup_free()]))


def kv_budget_bytes(device: torch.device, weight_bytes: int = 0) -> int:
    """Return the bytes of the memory free now that one worker may fill with KV cache.

    These are 92 % on a GPU and 25 % on a CPU, whose memory other programs and workers use, too.
    `weight_bytes` are those of weights that are yet to be loaded, which are not free then.
    """
    return int((free_bytes(device) - weight_bytes) * SHARES[device.type])


def measure_peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """Run `work`, and return the most bytes that it held at once beyond those held before.

    On a GPU these are the bytes that torch's allocator reserved for it, including pieces too
    fragmented for other use. On a CPU they are the memory that the whole process touched, by other
    threads too. Raises what `work` raises.
    """
    release_cached_memory(device)
    if device.type == "cuda":
        before = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return int(torch.cuda.max_memory_reserved(device)) - before
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _read_fields(Path("/proc/self/status"))["VmRSS"]
    work()
    return max(0, _read_fields(Path("/proc/self/status"))["VmHWM"] - before) * 1024


def measure_kept_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """Run `work`, and return by how many bytes the free memory has shrunk after it.

    Freed memory is given back before and after, so that only what stays allocated counts: recorded
    CUDA graphs, for example, keep a memory pool and memory of the driver. Never below zero. Raises
    what `work` raises.
    """
    release_cached_memory(device)
    before = free_bytes(device)
    work()
    release_cached_memory(device)
    return max(0, before - free_bytes(device))


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's tensors in this process, of a sharded tensor its own part.

    Tensors that layers share count once.
    """
    places = [d for m in model.modules() for d in (m._parameters, m._buffers, vars(m))]
    tensors = {id(t): t for place in places for t in place.values() if isinstance(t, torch.Tensor)}
    parts = (t.to_local() if isinstance(t, DTensor) else t for t in tensors.values())
    return sum(t.numel() * t.element_size() for t in parts)


def release_cached_memory(device: torch.device) -> None:
    """Give freed memory, which allocators would keep, back to the device or operating system.

    Collects garbage first, which takes some time.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the error says that an allocation failed, on a GPU or a CPU.

    On a CPU torch raises a RuntimeError, which is recognised by its text.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def _read_fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of `Name: 123 kB` lines; other lines are left out."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _cgroup_free() -> list[int]:
    """Bytes free within the container's limit (cgroup v2), or nothing without a limit.

    File caches count as free: the kernel drops them.
    """
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except FileNotFoundError:
        return []
    if limit == "max":
        return []
    return [int(limit) - used + _read_fields(_CGROUP / "memory.stat")["inactive_file"]]
