"""One rank's forward pass over a plan: the model, its attention over paged KV, recorded steps."""

from collections.abc import Callable, Mapping
from functools import partial

import structlog
import torch
from torch import Tensor

from gpu_worker.engines import memory
from gpu_worker.engines.paged import model as models
from gpu_worker.engines.paged.attention import PagedAttention
from gpu_worker.engines.paged.decode_batch import DecodeBatch, DecodeStep
from gpu_worker.engines.paged.graphs import DecodeGraphs
from gpu_worker.engines.paged.plan import Plan
from gpu_worker.engines.paged.run import Slice, Window

log = structlog.get_logger()


class ForwardPass:
    """Computes plans with a loaded model; `blocks`: how much KV the layers of each window have."""

    def __init__(self, loaded: models.Loaded, blocks: Mapping[Window, int]) -> None:
        self._model, self._vocabulary, self._windows = loaded.model, loaded.vocabulary, list(blocks)
        device, dtype = self._model.device, self._model.dtype
        self.attention = PagedAttention(loaded.layers, blocks, dtype, device)
        self._model.set_attn_implementation(self.attention.name)
        self.graphs: DecodeGraphs | None = None

    def plan_recording(self, rows: int, longest: int) -> None:
        """Have `record` record decode steps of up to `rows` sequences, where a kernel decodes."""
        if self.attention.kernels.decode:
            device = self._model.device
            batch = DecodeBatch(self._windows, rows, longest, device)
            self.graphs = DecodeGraphs(self._decode, batch, rows, self._vocabulary, device)

    @torch.inference_mode()
    def record(self) -> None:
        """Record decode steps of every size; a model that cannot be recorded runs without."""
        if self.graphs is None:
            return
        try:
            self.graphs.record()
        except RuntimeError as error:  # whatever in the model waits for the device
            log.warning("decode_graphs_off", reason=str(error))
            self.graphs = None

    def recorded_bytes(self) -> int:
        """What recording keeps of the device's memory, by doing it."""
        return memory.kept_bytes(self._model.device, self.record) if self.graphs else 0

    def plan(self, slices: list[Slice]) -> Plan:
        """A plan for slices, on the model's device."""
        return Plan(slices, self._model.dtype, self._model.device)

    def prepared(self, plan: Plan, *, replay: bool) -> Callable[[], Tensor]:
        """The pass over a plan, its inputs on the device: logits of the rows that are sampled.

        With `replay` it is a recorded one where there is one that fits.
        """
        if replay and self.graphs and plan.decodes_only:
            self.graphs.show(plan.slices)
            return partial(self.graphs.run, len(plan.slices))
        return partial(self._compute, plan, plan.ids, plan.positions, plan.rows)

    def close(self) -> None:
        """Free the memory of KV and recordings."""
        self.attention.close()
        self.graphs = None

    def _compute(self, plan: Plan, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        self.attention.plan = plan
        result = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: Tensor = result.logits[0, : len(plan.sampled)]
        return logits

    def _decode(self, step: DecodeStep) -> Tensor:
        self.attention.plan = step
        result = self._model(
            input_ids=step.ids[None], position_ids=step.positions[None], use_cache=False
        )
        logits: Tensor = result.logits[0]
        return logits
