"""The transformers engine. One step: schedule, one packed forward pass, sample, report."""

import structlog
import torch

from gpu_worker.engines import device_memory
from gpu_worker.engines.engine import DoesNotFit, EngineError, FreeCapacity, Output, Sequence
from gpu_worker.engines.engine_stats import EngineStats
from gpu_worker.engines.paged import model_loader as models
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS, blocks_for
from gpu_worker.engines.paged.batch.kv_cache_manager import KvCacheManager, pool_sizes
from gpu_worker.engines.paged.batch.scheduler import Scheduler
from gpu_worker.engines.paged.batch.sequence_state import SequenceSlice, SequenceState
from gpu_worker.engines.paged.generating_sequence import GeneratingSequence, TokenVocabulary
from gpu_worker.engines.paged.grammar_compiler import GrammarCompiler
from gpu_worker.engines.paged.model_runner import ModelRunner
from gpu_worker.engines.paged.sampler import RowSampling, SampledToken
from gpu_worker.engines.paged.step_executor import (
    SequenceFailed,
    StepComputed,
    StepExecutor,
    StepTooLarge,
)
from gpu_worker.engines.paged.tensor_parallel import TensorParallelGroup
from gpu_worker.engines.paged.warmup import largest_step_sequences, warmup_sequences
from gpu_worker.engines.paged.weights.lora_manager import LoraManager
from gpu_worker.engines.sequence_limits import SequenceLimits
from gpu_worker.engines.step_timer import measure
from streams.errors import BadGrammar

log = structlog.get_logger()

ADAPTER_BYTES = 1 << 30


class TransformersEngine:
    """An `Engine` over a loaded causal language model; a sequence's tokens depend on no other's.

    `kv_tokens` None: as many as fit the memory that is free. At most `max_sequences` run at once,
    and a step computes at most `max_batch_tokens`.
    """

    preempts = True

    def __init__(
        self,
        loaded: models.LoadedCausalLM,
        max_sequences: int = 64,
        max_batch_tokens: int = 512,
        kv_tokens: int | None = None,
        prefix_cache: bool = True,
        adapter_bytes: int = ADAPTER_BYTES,
        group: TensorParallelGroup | None = None,
    ) -> None:
        self._group = group or TensorParallelGroup()
        self._model = loaded.model
        self._vocabulary = TokenVocabulary(loaded.tokenizer, loaded.eos_ids)
        if kv_tokens is None:
            spare = device_memory.kv_budget_bytes(loaded.model.device)
            kv_tokens = models.max_kv_tokens(loaded, max_sequences, max_batch_tokens, spare)
        self._blocks = blocks_for(kv_tokens)
        windows = {layer.window for layer in loaded.kv_layers}
        sizes = pool_sizes(windows, kv_tokens, max_sequences, max_batch_tokens)
        self._kv_cache = KvCacheManager(sizes, max_batch_tokens, prefix_cache)
        self._scheduler = Scheduler(self._kv_cache, max_sequences, max_batch_tokens)
        self._runner = ModelRunner(loaded, sizes)
        self._group.allocate_kv(sizes)
        self._adapters = LoraManager(self._model, adapter_bytes)
        self._executor = StepExecutor(self._runner, self._adapters, self._group, self._row_sampling)
        longest = min(loaded.context_length, self._blocks * BLOCK_TOKENS)
        self._limits = SequenceLimits(
            loaded.vocab_size, longest, adapters=self._group.world_size == 1
        )
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids)
        self._max_sequences, self._max_batch_tokens = max_sequences, max_batch_tokens
        if self._group.world_size == 1:
            self._runner.enable_graphs(max_sequences, longest)
        self._sequences: dict[str, GeneratingSequence] = {}
        self._reserved = 0
        self._ready: list[Output] = []
        self._stats = EngineStats()

    def warm_up(self) -> None:
        """Run prefill and decode over full and small batches, then forget them.

        Raises the error of a model that cannot run at all.
        """
        longest = min(self._max_batch_tokens, self._limits.tokens - 2)
        for sequence in warmup_sequences(longest, self._max_sequences):
            self.add(sequence)
        while not self.idle:
            self._step_or_raise()
        self._runner.capture_graphs()
        self._kv_cache.reset_prefix_cache()
        self._scheduler.reset_counters()
        self._stats = EngineStats()

    def measure_step_bytes(self) -> int:
        """What steps take beside weights and KV, measured; the engine is of no use after it.

        The largest has all tokens and all samples; recorded decode steps keep what theirs took.
        """
        longest = self._limits.tokens
        for sequence in largest_step_sequences(
            self._max_batch_tokens, self._max_sequences, longest
        ):
            self.add(sequence)
        peak = device_memory.measure_peak_bytes(self._model.device, self._step_or_raise)
        return peak + self._runner.measure_graph_bytes()

    def _step_or_raise(self) -> None:
        for output in self.step():
            if output.error:
                raise output.error
        if self._scheduler.token_budget < self._max_batch_tokens:
            raise DoesNotFit(
                f"a step of {self._max_batch_tokens} tokens does not fit the memory beside the "
                "weights; lower --max-batch-tokens"
            )

    def add(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self._sequences, f"{sequence.request_id} is here"
        adapter = sequence.adapter
        if refusal := self._limits.find_refusal(sequence) or self._adapters.refusal(adapter):
            self._ready.append(Output(sequence.request_id, error=refusal))
            return
        generation = GeneratingSequence(sequence, self._vocabulary, self._model.device)
        if finish := generation.finish_reason():
            self._ready.append(Output(sequence.request_id, finish=finish))
            return
        self._sequences[sequence.request_id] = generation
        self._reserved += generation.max_blocks
        if grammar := sequence.sampling.grammar:
            self._grammars.start_compiling(sequence.request_id, grammar)
        else:
            self._schedule(generation)

    def cancel(self, request_id: str) -> None:
        if generation := self._sequences.get(request_id):
            held = generation.text.finish()
            cached = generation.cached_tokens
            self._ready.append(Output(request_id, text=held, finish="cancelled", cached=cached))
            waits = self._grammars.stop_waiting(request_id) or self._adapters.is_waiting(request_id)
            if not waits:
                self._scheduler.remove(generation.state)
            self._remove(generation)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        self._group.raise_if_lost()
        self._schedule_compiled()
        self._schedule_adapted()
        outputs, self._ready = self._ready, []
        with measure(self._stats, "schedule"):
            slices = self._scheduler.schedule()
            unclean = self._kv_cache.pop_blocks_to_zero()
            self._group.zero_blocks(unclean)
            self._runner.attention.zero_blocks(unclean)
        if slices:
            self._stats.steps += 1
            outputs += self._execute(slices)
        elif not outputs:
            self._adapters.nap_while_loading()
        return outputs

    def free_capacity(self) -> FreeCapacity:
        sequences = self._scheduler.max_running - len(self._sequences)
        tokens = (self._blocks - self._reserved) * BLOCK_TOKENS
        return FreeCapacity(max(0, sequences), max(0, tokens))

    def concurrency_limit(self) -> int:
        """Sequences that may run at once: less than at first while steps do not fit the memory."""
        return self._scheduler.max_running

    def cached_prefix_hashes(self) -> list[int]:
        """The marks of cached prefixes and loaded adapters."""
        return [*self._kv_cache.prefix_hashes(), *self._adapters.loaded_hashes]

    @property
    def idle(self) -> bool:
        return not self._sequences and not self._ready and not self._group.lost_reason

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges as of now; the same object each time."""
        stats, cache, scheduler = self._stats, self._kv_cache, self._scheduler
        stats.preemptions, stats.hit_tokens = scheduler.preemptions, scheduler.hit_tokens
        stats.query_tokens = scheduler.query_tokens
        stats.adapter_loads = self._adapters.load_count
        stats.kv_used = (cache.total_blocks - cache.available_blocks) * BLOCK_TOKENS
        stats.kv_cached = cache.cached_blocks * BLOCK_TOKENS
        stats.kv_free = (cache.available_blocks - cache.cached_blocks) * BLOCK_TOKENS
        return stats

    def close(self) -> None:
        """End the other ranks, forget every sequence, give back the memory of weights and KV."""
        self._group.close()
        self.close_keeping_ranks()

    def close_keeping_ranks(self) -> None:
        """As `close`, but the other ranks stay, for another engine."""
        self._sequences.clear()
        self._ready.clear()
        self._adapters.close()
        self._runner.close()
        self._grammars.close()
        device = self._model.device
        del self._executor, self._runner, self._model
        device_memory.release_cached_memory(device)

    def _schedule(self, generation: GeneratingSequence) -> None:
        """Let a sequence run as soon as its adapter is there."""
        if generation.sequence.adapter:
            self._adapters.wait_for_adapter(generation.sequence)
        else:
            self._scheduler.add(generation.state)

    def _schedule_compiled(self) -> None:
        """Schedule those whose grammar has been compiled, behind their `generated` tokens."""
        nothing_else = not self._ready and self._scheduler.idle
        for request_id, found in self._grammars.pop_ready(patient=nothing_else).items():
            generation = self._sequences[request_id]
            if isinstance(found, BadGrammar):
                self._refuse(generation, EngineError(found.code, found.message))
                continue
            generation.matcher = found
            found.advance(generation.sequence.generated)
            if finish := generation.finish_reason():
                self._remove(generation)
                self._ready.append(Output(request_id, finish=finish))
            else:
                self._schedule(generation)

    def _schedule_adapted(self) -> None:
        """Schedule those whose adapter has come."""
        for request_id, error in self._adapters.pop_ready():
            generation = self._sequences[request_id]
            if error:
                self._refuse(generation, error)
            else:
                self._scheduler.add(generation.state)

    def _refuse(self, generation: GeneratingSequence, error: EngineError) -> None:
        """End a sequence that cannot have what it waited for."""
        self._remove(generation)
        self._ready.append(Output(generation.sequence.request_id, error=error))

    def _execute(self, slices: list[SequenceSlice]) -> list[Output]:
        outputs: list[Output] = []
        for outcome in self._executor.execute(slices, self._stats):
            match outcome:
                case StepComputed():
                    outputs += self._commit(outcome)
                case StepTooLarge():
                    outputs += self._lower_budget(outcome)
                case SequenceFailed(run, reason):
                    outputs.append(self._fail(run, reason))
        return outputs

    def _commit(self, computed: StepComputed) -> list[Output]:
        with measure(self._stats, "report"):
            self._scheduler.commit(computed.slices)
            self._stats.prefilled += sum(s.count for s in computed.slices if not s.is_decode)
            return [self._append_token(run, sampled) for run, sampled in computed.sampled]

    def _lower_budget(self, step: StepTooLarge) -> list[Output]:
        """Have the next steps compute less; a single token that does not fit fails."""
        if self._scheduler.halve_budget(step.slices):
            log.warning(
                "step_out_of_memory", budget=self._scheduler.token_budget, reason=step.reason
            )
            return []
        reason = f"out of memory with one token: {step.reason}"
        return [self._fail(step.slices[0].state, reason)]

    def _row_sampling(self, run: SequenceState) -> RowSampling:
        return self._sequences[run.request_id].row_sampling()

    def _append_token(self, run: SequenceState, sampled: SampledToken) -> Output:
        """Append a token to its sequence and say what that made of it."""
        token = sampled.token
        if token is None:
            return self._fail(run, "the model's output is not a number")
        generation = self._sequences[run.request_id]
        text = generation.append_token(token)
        if generation.matcher and (failure := generation.matcher.failure):
            return self._fail(run, failure, BadGrammar.code)
        self._stats.generated += 1
        if finish := generation.finish_reason():
            text += generation.text.finish()
            self._remove(generation)
            self._scheduler.remove(run)
        logprobs = self._vocabulary.to_logprobs(sampled)
        cached = generation.cached_tokens if finish else 0
        return Output(run.request_id, [token], text, logprobs, finish=finish, cached=cached)

    def _fail(self, run: SequenceState, reason: str, code: str = "engine_failed") -> Output:
        """Drop a sequence alone; its KV is cleared before anybody else has its blocks."""
        self._remove(self._sequences[run.request_id])
        self._scheduler.discard(run)
        return Output(run.request_id, error=EngineError(code, reason))

    def _remove(self, generation: GeneratingSequence) -> None:
        del self._sequences[generation.sequence.request_id]
        self._adapters.unpin(generation.sequence.request_id)
        self._reserved -= generation.max_blocks
