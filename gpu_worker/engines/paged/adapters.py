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

from gpu_worker.engine import EngineError, Sequence
from gpu_worker.engines.paged.lora import Additions, Weights, load, places
from gpu_worker.engines.paged.plan import Plan
from gpu_worker.engines.paged.transfer import sent
from streams import marks
from streams.errors import MillstreamError
from streams.messages import Adapter
from streams.subjects import Priority

NAP_SECONDS = 0.002
PATIENCE_SECONDS = 5.0
CODE = "adapter_failed"
log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class _Entry:
    """An adapter that has its memory, and may still be on its way there."""

    adapter: Adapter
    bytes: int
    loading: Future[Weights]


class Adapters:
    """At most `max_bytes` of adapters, by digest, least recently used first.

    Owned by the engine's thread; only `load` runs in another one. No adapter is loaded twice at a
    time, and none goes while a sequence runs with it.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        self._places = places(model)
        self._dtype, self._device = model.dtype, model.device
        self._max_bytes = max_bytes
        self._additions = Additions(self._places)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._waiting: dict[str, tuple[float, Sequence]] = {}  # with its turn
        self._held: dict[str, _Entry] = {}  # by request
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self.loads = 0
        self.marks: tuple[int, ...] = ()  # of those that are loaded

    def refusal(self, adapter: Adapter | None) -> EngineError | None:
        """Why an adapter can never run here, or None."""
        if adapter is None or self._size(adapter) <= self._max_bytes:
            return None
        return EngineError(
            CODE,
            f"the adapter {adapter.name!r} takes {self._size(adapter)} bytes, all adapters of this "
            f"worker together may take {self._max_bytes} (adapter_bytes)",
        )

    def want(self, sequence: Sequence) -> None:
        """Let a sequence that has an adapter wait until `ready` names it."""
        turn = monotonic() + PATIENCE_SECONDS * list(Priority).index(sequence.priority)
        self._waiting[sequence.request_id] = turn, sequence

    def waits(self, request_id: str) -> bool:
        return request_id in self._waiting

    def leave(self, request_id: str) -> None:
        """A sequence is gone, whether it waited or ran. Idempotent."""
        self._waiting.pop(request_id, None)
        self._held.pop(request_id, None)

    def ready(self) -> list[tuple[str, EngineError | None]]:
        """The sequences whose wait is over, or that cannot run; starts what is to be loaded."""
        if not self._waiting:
            return []
        found: list[tuple[str, EngineError | None]] = []
        loaded = {entry for entry in self._entries.values() if entry.loading.done()}
        kept = set(self._held.values())  # and what those wait for that came before
        for _, sequence in sorted(self._waiting.values(), key=itemgetter(0)):
            request_id, adapter = sequence.request_id, sequence.adapter
            assert adapter
            entry = self._entries.get(adapter.digest) or self._load(adapter, kept)
            if entry is None:
                break
            kept.add(entry)
            if entry in loaded:
                del self._waiting[request_id]
                found.append((request_id, self._hold(request_id, entry)))
        self._forget_failures(loaded)
        return found

    def rest(self) -> None:
        """Wait a moment for what is being loaded, if anything is."""
        loading = [entry.loading for entry in self._entries.values() if not entry.loading.done()]
        if loading:
            wait_for(loading, NAP_SECONDS, FIRST_COMPLETED)

    def apply(self, plan: Plan) -> None:
        """Let the forward pass of this plan add each sequence's adapter to its rows."""
        rows: dict[Weights, list[int]] = {}
        row = 0
        for piece in plan.slices if self._held else ():
            if entry := self._held.get(piece.run.request_id):
                rows.setdefault(entry.loading.result(), []).extend(range(row, row + piece.count))
            row += piece.count
        self._additions.set({w: sent(r, torch.long, self._device) for w, r in rows.items()})

    @property
    def active(self) -> bool:
        """Whether the forward pass that was applied last adds any."""
        return self._additions.active

    def close(self) -> None:
        """Forget everything; a load that is under way ends by itself."""
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._additions.set({})
        self._entries.clear()
        self._waiting.clear()
        self._held.clear()

    def _hold(self, request_id: str, entry: _Entry) -> EngineError | None:
        """Keep an adapter for a sequence; if it could not be loaded, say why."""
        if reason := _failure(entry):
            name = entry.adapter.name
            return EngineError(CODE, f"the adapter {name!r} cannot be loaded: {reason}")
        self._held[request_id] = entry
        self._entries.move_to_end(entry.adapter.digest)
        self._mark()
        return None

    def _load(self, adapter: Adapter, kept: Set[_Entry]) -> _Entry | None:
        """Begin to load; None while there is no room beside what must be kept."""
        size = self._size(adapter)
        room = self._max_bytes - sum(entry.bytes for entry in self._entries.values())
        for entry in [e for e in self._entries.values() if e.loading.done() and e not in kept]:
            if room < size:
                self._evict(entry)
                room += entry.bytes
        if room < size:
            return None
        self.loads += 1
        loading = self._loader.submit(load, adapter, self._places, self._dtype, self._device)
        entry = self._entries[adapter.digest] = _Entry(adapter, size, loading)
        return entry

    def _forget_failures(self, loaded: Set[_Entry]) -> None:
        """Who waited was told; the next request tries again."""
        for entry in loaded & set(self._entries.values()):
            if reason := _failure(entry):
                log.error("adapter_failed", adapter=entry.adapter.name, reason=reason)
                self._evict(entry)

    def _evict(self, entry: _Entry) -> None:
        del self._entries[entry.adapter.digest]
        self._additions.set({})  # its hooks would keep the weights
        self._mark()

    def _mark(self) -> None:
        """A new tuple each time, for those who read it from other threads."""
        loaded = [entry.adapter for entry in self._entries.values() if entry.loading.done()]
        self.marks = tuple(marks.of_adapter(adapter.name) for adapter in loaded)

    def _size(self, adapter: Adapter) -> int:
        return adapter.parameters * self._dtype.itemsize


def _failure(entry: _Entry) -> str | None:
    """Why an adapter whose loading has ended is not there, or None."""
    error = entry.loading.exception()
    if error is None:
        return None
    return str(error) if isinstance(error, MillstreamError) else repr(error)
