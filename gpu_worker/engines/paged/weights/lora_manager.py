"""The LoRA adapters of one model: loaded when they are first asked for, kept while there is room.

A sequence waits here, outside the scheduler, until its adapter is in memory; the batch goes on.
Sequences come in by priority, those of one in order of arrival: one whose adapter finds no room
holds up those behind it, or adapters in constant use would keep it out for ever. For the same
reason nobody overtakes who came more than `PATIENCE_SECONDS` earlier for each step of priority.
"""

from collections import OrderedDict
from collections.abc import Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from operator import itemgetter
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
log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class _CachedAdapter:
    """An adapter that has its memory, and may still be on its way there."""

    adapter: AdapterRef
    bytes: int
    loading: Future[LoraWeights]


class LoraManager:
    """At most `max_bytes` of adapters, by digest, least recently used first.

    Owned by the engine's thread; only `load` runs in another one. No adapter is loaded twice at a
    time, and none goes while a sequence runs with it.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        self._targets = find_targets(model)
        self._dtype, self._device = model.dtype, model.device
        self._max_bytes = max_bytes
        self._hooks = LoraHooks(self._targets)
        self._entries: OrderedDict[str, _CachedAdapter] = OrderedDict()
        self._waiting: dict[str, tuple[float, Sequence]] = {}  # with its turn
        self._pinned: dict[str, _CachedAdapter] = {}  # by request
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self.load_count = 0
        self.loaded_hashes: tuple[int, ...] = ()  # of those that are loaded

    def refusal(self, adapter: AdapterRef | None) -> EngineError | None:
        """Why an adapter can never run here, or None."""
        if adapter is None or self._adapter_bytes(adapter) <= self._max_bytes:
            return None
        return EngineError(
            ADAPTER_FAILED,
            f"the adapter {adapter.name!r} takes {self._adapter_bytes(adapter)} bytes, all adapters "
            f"of this worker together may take {self._max_bytes} (adapter_bytes)",
        )

    def wait_for_adapter(self, sequence: Sequence) -> None:
        """Let a sequence that has an adapter wait until `ready` names it."""
        turn = monotonic() + PATIENCE_SECONDS * list(Priority).index(sequence.priority)
        self._waiting[sequence.request_id] = turn, sequence

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def unpin(self, request_id: str) -> None:
        """A sequence is gone, whether it waited or ran. Idempotent."""
        self._waiting.pop(request_id, None)
        self._pinned.pop(request_id, None)

    def pop_ready(self) -> list[tuple[str, EngineError | None]]:
        """The sequences whose wait is over, or that cannot run; starts what is to be loaded."""
        if not self._waiting:
            return []
        found: list[tuple[str, EngineError | None]] = []
        loaded = {entry for entry in self._entries.values() if entry.loading.done()}
        kept = set(self._pinned.values())  # and what those wait for that came before
        for _, sequence in sorted(self._waiting.values(), key=itemgetter(0)):
            request_id, adapter = sequence.request_id, sequence.adapter
            assert adapter
            entry = self._entries.get(adapter.digest) or self._start_load(adapter, kept)
            if entry is None:
                break
            kept.add(entry)
            if entry in loaded:
                del self._waiting[request_id]
                found.append((request_id, self._pin(request_id, entry)))
        self._evict_failed(loaded)
        return found

    def nap_while_loading(self) -> None:
        """Wait a moment for what is being loaded, if anything is."""
        loading = [entry.loading for entry in self._entries.values() if not entry.loading.done()]
        if loading:
            wait_for(loading, NAP_SECONDS, FIRST_COMPLETED)

    def apply(self, plan: StepInputs) -> None:
        """Let the forward pass of this plan add each sequence's adapter to its rows."""
        rows: dict[LoraWeights, list[int]] = {}
        row = 0
        for piece in plan.slices if self._pinned else ():
            if entry := self._pinned.get(piece.state.request_id):
                rows.setdefault(entry.loading.result(), []).extend(range(row, row + piece.count))
            row += piece.count
        self._hooks.assign_rows(
            {w: to_device(r, torch.long, self._device) for w, r in rows.items()}
        )

    @property
    def is_active(self) -> bool:
        """Whether the forward pass that was applied last adds any."""
        return self._hooks.is_active

    def close(self) -> None:
        """Forget everything; a load that is under way ends by itself."""
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._hooks.assign_rows({})
        self._entries.clear()
        self._waiting.clear()
        self._pinned.clear()

    def _pin(self, request_id: str, entry: _CachedAdapter) -> EngineError | None:
        """Keep an adapter for a sequence; if it could not be loaded, say why."""
        if reason := _load_failure(entry):
            name = entry.adapter.name
            return EngineError(ADAPTER_FAILED, f"the adapter {name!r} cannot be loaded: {reason}")
        self._pinned[request_id] = entry
        self._entries.move_to_end(entry.adapter.digest)
        self._update_hashes()
        return None

    def _start_load(self, adapter: AdapterRef, kept: Set[_CachedAdapter]) -> _CachedAdapter | None:
        """Begin to load; None while there is no room beside what must be kept."""
        size = self._adapter_bytes(adapter)
        room = self._max_bytes - sum(entry.bytes for entry in self._entries.values())
        for entry in [e for e in self._entries.values() if e.loading.done() and e not in kept]:
            if room < size:
                self._evict(entry)
                room += entry.bytes
        if room < size:
            return None
        self.load_count += 1
        loading = self._loader.submit(load_lora, adapter, self._targets, self._dtype, self._device)
        entry = self._entries[adapter.digest] = _CachedAdapter(adapter, size, loading)
        return entry

    def _evict_failed(self, loaded: Set[_CachedAdapter]) -> None:
        """Who waited was told; the next request tries again."""
        for entry in loaded & set(self._entries.values()):
            if reason := _load_failure(entry):
                log.error("adapter_failed", adapter=entry.adapter.name, reason=reason)
                self._evict(entry)

    def _evict(self, entry: _CachedAdapter) -> None:
        del self._entries[entry.adapter.digest]
        self._hooks.assign_rows({})  # its hooks would keep the weights
        self._update_hashes()

    def _update_hashes(self) -> None:
        """A new tuple each time, for those who read it from other threads."""
        loaded = [entry.adapter for entry in self._entries.values() if entry.loading.done()]
        self.loaded_hashes = tuple(prefix_hashes.hash_adapter(adapter.name) for adapter in loaded)

    def _adapter_bytes(self, adapter: AdapterRef) -> int:
        return adapter.parameters * self._dtype.itemsize


def _load_failure(entry: _CachedAdapter) -> str | None:
    """Why an adapter whose loading has ended is not there, or None."""
    error = entry.loading.exception()
    if error is None:
        return None
    return str(error) if isinstance(error, MillstreamError) else repr(error)
