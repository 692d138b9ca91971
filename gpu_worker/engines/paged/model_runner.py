"""One rank's forward pass over a plan: the model, its attention over paged KV, recorded steps."""

from collections.abc import Callable, Mapping
from functools import partial

import structlog
import torch
from torch import Tensor

from gpu_worker.engines import device_memory
from gpu_worker.engines.paged import model_loader as models
from gpu_worker.engines.paged.attention.paged_attention import PagedAttention
from gpu_worker.engines.paged.batch.decode_inputs import DecodeInputBuffers, DecodeInputs
from gpu_worker.engines.paged.batch.sequence_state import SequenceSlice, SlidingWindow
from gpu_worker.engines.paged.batch.step_inputs import StepInputs
from gpu_worker.engines.paged.cuda_graphs import DecodeGraphs

log = structlog.get_logger()


class ModelRunner:
    """Computes plans with a loaded model; `blocks`: how much KV the layers of each window have."""

    def __init__(self, loaded: models.LoadedCausalLM, blocks: Mapping[SlidingWindow, int]) -> None:
        self._model, self._vocabulary, self._windows = loaded.model, loaded.vocab_size, list(blocks)
        device, dtype = self._model.device, self._model.dtype
        self.attention = PagedAttention(loaded.kv_layers, blocks, dtype, device)
        self._model.set_attn_implementation(self.attention.name)
        self.graphs: DecodeGraphs | None = None

    def enable_graphs(self, rows: int, longest: int) -> None:
        """Have `record` record decode steps of up to `rows` sequences, where a kernel decodes."""
        if self.attention.kernels.decode:
            device = self._model.device
            batch = DecodeInputBuffers(self._windows, rows, longest, device)
            self.graphs = DecodeGraphs(self._forward_decode, batch, rows, self._vocabulary, device)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Record decode steps of every size; a model that cannot be recorded runs without."""
        if self.graphs is None:
            return
        try:
            self.graphs.capture()
        except RuntimeError as error:  # whatever in the model waits for the device
            log.warning("decode_graphs_off", reason=str(error))
            self.graphs = None

    def measure_graph_bytes(self) -> int:
        """What recording keeps of the device's memory, by doing it."""
        return (
            device_memory.measure_kept_bytes(self._model.device, self.capture_graphs)
            if self.graphs
            else 0
        )

    def make_inputs(self, slices: list[SequenceSlice]) -> StepInputs:
        """A plan for slices, on the model's device."""
        return StepInputs(slices, self._model.dtype, self._model.device)

    def prepare_forward(self, plan: StepInputs, *, replay: bool) -> Callable[[], Tensor]:
        """The pass over a plan, its inputs on the device: logits of the rows that are sampled.

        With `replay` it is a recorded one where there is one that fits.
        """
        if replay and self.graphs and plan.is_decode_only:
            self.graphs.fill_inputs(plan.slices)
            return partial(self.graphs.run, len(plan.slices))
        return partial(self._forward, plan, plan.input_ids, plan.positions, plan.logits_indices)

    def close(self) -> None:
        """Free the memory of KV and recordings."""
        self.attention.close()
        self.graphs = None

    def _forward(self, plan: StepInputs, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        self.attention.inputs = plan
        result = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: Tensor = result.logits[0, : len(plan.sampled_slices)]
        return logits

    def _forward_decode(self, step: DecodeInputs) -> Tensor:
        self.attention.inputs = step
        result = self._model(
            input_ids=step.input_ids[None], position_ids=step.positions[None], use_cache=False
        )
        logits: Tensor = result.logits[0]
        return logits
