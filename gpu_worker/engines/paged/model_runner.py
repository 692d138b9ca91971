"""One rank's forward pass: the model, paged attention over its KV, and recorded decode steps."""

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
    """Runs one rank's forward passes of a loaded model, over KV blocks that it allocates.

    `blocks` is the number of KV blocks of each layer, by the layer's sliding window. `graphs` is
    None unless decode steps are recorded as CUDA graphs.
    """

    def __init__(self, loaded: models.LoadedCausalLM, blocks: Mapping[SlidingWindow, int]) -> None:
        self._model, self._vocabulary, self._windows = loaded.model, loaded.vocab_size, list(blocks)
        device, dtype = self._model.device, self._model.dtype
        self.attention = PagedAttention(loaded.kv_layers, blocks, dtype, device)
        self._model.set_attn_implementation(self.attention.name)
        self.graphs: DecodeGraphs | None = None

    def enable_graphs(self, rows: int, longest: int) -> None:
        """Prepare to record decode steps of up to `rows` sequences of up to `longest` tokens each.

        Allocates the input buffers; `capture_graphs` records. Does nothing if no decode kernel was
        selected, since only steps with one can be recorded.
        """
        if self.attention.kernels.decode:
            device = self._model.device
            buffers = DecodeInputBuffers(self._windows, rows, longest, device)
            self.graphs = DecodeGraphs(
                self._forward_decode, buffers, rows, self._vocabulary, device
            )

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Record a CUDA graph of a decode step for each batch size, if `enable_graphs` prepared it.

        If the model cannot be recorded, logs the reason, sets `graphs` to None and raises nothing:
        decode steps then run without graphs.
        """
        if self.graphs is None:
            return
        try:
            self.graphs.capture()
        except RuntimeError as error:  # raised when anything in the model waits for the device
            log.warning("decode_graphs_off", reason=str(error))
            self.graphs = None

    def measure_graph_bytes(self) -> int:
        """Record the decode steps, and return the bytes of device memory that the recordings keep.

        Returns 0 if `enable_graphs` has prepared nothing.
        """
        return (
            device_memory.measure_kept_bytes(self._model.device, self.capture_graphs)
            if self.graphs
            else 0
        )

    def make_inputs(self, slices: list[SequenceSlice]) -> StepInputs:
        """Return the inputs of a step over `slices`, whose tensors are made when first used."""
        return StepInputs(slices, self._model.dtype, self._model.device)

    def prepare_forward(self, inputs: StepInputs, *, replay: bool) -> Callable[[], Tensor]:
        """Move a step's inputs to the device, and return a function that computes the forward pass.

        That function returns the logits `[sampled slices, vocabulary]`, in the order of
        `inputs.sampled_slices`; call it before the next `prepare_forward`. With `replay` a step
        that only decodes runs as a CUDA graph if graphs are enabled; its logits are overwritten by
        the next such step.
        """
        if replay and self.graphs and inputs.is_decode_only:
            self.graphs.fill_inputs(inputs.slices)
            return partial(self.graphs.run, len(inputs.slices))
        return partial(
            self._forward, inputs, inputs.input_ids, inputs.positions, inputs.logits_indices
        )

    def close(self) -> None:
        """Free the memory of KV and CUDA graphs. The runner must not be used afterwards."""
        self.attention.close()
        self.graphs = None

    def _forward(self, inputs: StepInputs, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        self.attention.inputs = inputs
        result = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: Tensor = result.logits[0, : len(inputs.sampled_slices)]
        return logits

    def _forward_decode(self, decode_inputs: DecodeInputs) -> Tensor:
        self.attention.inputs = decode_inputs
        result = self._model(
            input_ids=decode_inputs.input_ids[None],
            position_ids=decode_inputs.positions[None],
            use_cache=False,
        )
        logits: Tensor = result.logits[0]
        return logits
