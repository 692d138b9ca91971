"""The LoRA adapters of one model: loaded on demand, kept within a byte bound, evicted by LRU.

A sequence waits here, outside the scheduler, until its adapter is in memory; the batch goes on.
Waiting sequences are served by priority, then in order of arrival. One whose adapter finds no room
holds up those behind it, since adapters in constant use would otherwise keep it out for ever. For
the same reason priority counts for a limited time: each level is worth `PATIENCE_SECONDS` of
waiting, so a sequence never overtakes one that has waited longer than that.
"""

from collections import OrderedDict
from collections.abc import Callable, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from time import monotonic

import structlog
import torch
from transformers import PreTrainedModel

from gpu_worker.engines.device_transfer import to_device
from gpu_worker.engines.engine import EngineError, Sequence
from gpu_worker.engines.paged.batch.step_inputs import StepInputs
from gpu_worker.engines.paged.weights.lora import LoraHooks, LoraWeights, find_targets, load_lora
from streams import prefix_hashes
from streams.errors import MillstreamError
from streams.messages import AdapterRef
from streams.subjects import Priority

NAP_SECONDS = 0.002
PATIENCE_SECONDS = 5.0
ADAPTER_FAILED = "adapter_failed"
CheckDirectory = Callable[[Path], None]
log = structlog.get_logger()


def allow_all(directory: Path) -> None:
    """Let adapters be loaded from every directory."""


@dataclass(frozen=True, eq=False)
class _CachedAdapter:
    """An adapter with memory reserved for it, loaded or still loading."""

    adapter: AdapterRef
    bytes: int
    loading: Future[LoraWeights]


class LoraManager:
    """Loads a model's LoRA adapters on demand and keeps at most `max_bytes` of them in memory.

    An engine has one and calls all methods from its own thread; only `load_lora` runs in another
    one. An adapter is not loaded twice at the same time, and is not evicted while a sequence runs
    with it. The least recently used is evicted first. `check_directory` raises for a directory from
    which none may be loaded. `loaded_hashes`, the hashes of the loaded adapters' names, may be read
    from any thread.
    """

    def __init__(
        self, model: PreTrainedModel, max_bytes: int, check_directory: CheckDirectory = allow_all
    ) -> None:
        self._targets = find_targets(model)
        self._dtype, self._device = model.dtype, model.device
        self._max_bytes, self._check_directory = max_bytes, check_directory
        self._hooks = LoraHooks(self._targets)
        self._entries: OrderedDict[str, _CachedAdapter] = OrderedDict()
        self._waiting: dict[str, tuple[float, Sequence]] = {}  # with the time that orders them
        self._pinned: dict[str, _CachedAdapter] = {}  # by request
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self.load_count = 0
        self.loaded_hashes: tuple[int, ...] = ()  # of the loaded adapters' names

    def refusal(self, adapter: AdapterRef | None) -> EngineError | None:
        """Return the error for an adapter that is larger than `max_bytes` and cannot be loaded.

        None if the adapter can be loaded, or if `adapter` is None.
        """
        if adapter is None or self._adapter_bytes(adapter) <= self._max_bytes:
            return None
        return EngineError(
            ADAPTER_FAILED,
            f"the adapter {adapter.name!r} takes {self._adapter_bytes(adapter)} bytes, all "
            f"adapters of this worker together may take {self._max_bytes} (adapter_bytes)",
        )

    def wait_for_adapter(self, sequence: Sequence) -> None:
        """Let a sequence that has an adapter wait for it, and return at once.

        `pop_ready` starts the loading, and returns the sequence when its adapter is loaded or has
        failed.
        """
        turn_time = monotonic() + PATIENCE_SECONDS * list(Priority).index(sequence.priority)
        self._waiting[sequence.request_id] = turn_time, sequence

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a sequence waits for its adapter, not yet returned by `pop_ready`."""
        return request_id in self._waiting

    def unpin(self, request_id: str) -> None:
        """Forget a sequence, waiting or running, so that its adapter can be evicted.

        Does nothing for an unknown id.
        """
        self._waiting.pop(request_id, None)
        self._pinned.pop(request_id, None)

    def pop_ready(self) -> list[tuple[str, EngineError | None]]:
        """Return the waiting sequences whose adapter is done, as request id and error, once each.

        The error is None if the adapter is loaded; it then stays loaded until `unpin`. Otherwise
        the error says why it could not be loaded. Does not wait: it starts loading what the other
        sequences need, as far as memory allows, in the order given at the top of this module.
        """
        if not self._waiting:
            return []
        ready: list[tuple[str, EngineError | None]] = []
        loaded = {entry for entry in self._entries.values() if entry.loading.done()}
        needed = set(self._pinned.values())  # then also those of sequences served before
        for _, sequence in sorted(self._waiting.values(), key=itemgetter(0)):
            request_id, adapter = sequence.request_id, sequence.adapter
            assert adapter
            entry = self._entries.get(adapter.digest) or self._start_load(adapter, needed)
            if entry is None:
                break
            needed.add(entry)
            if entry in loaded:
                del self._waiting[request_id]
                ready.append((request_id, self._pin(request_id, entry)))
        self._evict_failed(loaded)
        return ready

    def nap_while_loading(self) -> None:
        """Wait up to `NAP_SECONDS` (2 ms) for an adapter that is loading; not at all if none is."""
        loading = [entry.loading for entry in self._entries.values() if not entry.loading.done()]
        if loading:
            wait_for(loading, NAP_SECONDS, FIRST_COMPLETED)

    def apply(self, inputs: StepInputs) -> None:
        """Let the forward pass over `inputs` add each sequence's adapter to its rows.

        A sequence has its adapter once `pop_ready` has returned it. Other sequences' rows stay
        unchanged.
        """
        rows: dict[LoraWeights, list[int]] = {}
        row = 0
        for seq_slice in inputs.slices if self._pinned else ():
            if entry := self._pinned.get(seq_slice.state.request_id):
                rows.setdefault(entry.loading.result(), []).extend(
                    range(row, row + seq_slice.count)
                )
            row += seq_slice.count
        self._hooks.assign_rows(
            {w: to_device(r, torch.long, self._device) for w, r in rows.items()}
        )

    @property
    def is_active(self) -> bool:
        """True when a sequence in the inputs last given to `apply` has an adapter."""
        return self._hooks.is_active

    def close(self) -> None:
        """Drop all adapters and sequences without waiting; loads that have not begun are cancelled.

        A load that has begun runs to its end in the background.
        """
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._hooks.assign_rows({})
        self._entries.clear()
        self._waiting.clear()
        self._pinned.clear()

    def _pin(self, request_id: str, entry: _CachedAdapter) -> EngineError | None:
        """Keep an adapter while a sequence runs; returns the error if it could not be loaded."""
        if reason := _load_failure(entry):
            name = entry.adapter.name
            return EngineError(ADAPTER_FAILED, f"the adapter {name!r} cannot be loaded: {reason}")
        self._pinned[request_id] = entry
        self._entries.move_to_end(entry.adapter.digest)
        self._update_hashes()
        return None

    def _start_load(
        self, adapter: AdapterRef, needed: Set[_CachedAdapter]
    ) -> _CachedAdapter | None:
        """Start loading an adapter, evicting others; None if there is no room beside `needed`."""
        size = self._adapter_bytes(adapter)
        free_bytes = self._max_bytes - sum(entry.bytes for entry in self._entries.values())
        for entry in [e for e in self._entries.values() if e.loading.done() and e not in needed]:
            if free_bytes < size:
                self._evict(entry)
                free_bytes += entry.bytes
        if free_bytes < size:
            return None
        self.load_count += 1
        loading = self._loader.submit(self._load, adapter)
        entry = self._entries[adapter.digest] = _CachedAdapter(adapter, size, loading)
        return entry

    def _load(self, adapter: AdapterRef) -> LoraWeights:
        self._check_directory(Path(adapter.directory))
        return load_lora(adapter, self._targets, self._dtype, self._device)

    def _evict_failed(self, loaded: Set[_CachedAdapter]) -> None:
        """Drop adapters that failed to load, so that the next request tries again.

        The sequences that waited for them have got the error.
        """
        for entry in loaded & set(self._entries.values()):
            if reason := _load_failure(entry):
                log.error("adapter_failed", adapter=entry.adapter.name, reason=reason)
                self._evict(entry)

    def _evict(self, entry: _CachedAdapter) -> None:
        del self._entries[entry.adapter.digest]
        self._hooks.assign_rows({})  # its hooks would keep the weights
        self._update_hashes()

    def _update_hashes(self) -> None:
        """Replace `loaded_hashes` by a new tuple, since other threads read it."""
        loaded = [entry.adapter for entry in self._entries.values() if entry.loading.done()]
        self.loaded_hashes = tuple(prefix_hashes.hash_adapter(adapter.name) for adapter in loaded)

    def _adapter_bytes(self, adapter: AdapterRef) -> int:
        return adapter.parameters * self._dtype.itemsize


def _load_failure(entry: _CachedAdapter) -> str | None:
    """Return why the loading of an adapter, which has ended, failed; None if it did not."""
    error = entry.loading.exception()
    if error is None:
        return None
    return str(error) if isinstance(error, MillstreamError) else repr(error)
