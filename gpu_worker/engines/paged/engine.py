"""The transformers engine: each step schedules, runs one forward pass, samples and reports."""

from dataclasses import replace

import structlog
import torch

from gpu_worker.engines import device_memory
from gpu_worker.engines.checkpoints.loading import UnsupportedModel
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
from gpu_worker.engines.paged.proof import ForcedText, ForcedTokens, prove
from gpu_worker.engines.paged.sampler import RowSampling, SampledToken
from gpu_worker.engines.paged.step_executor import (
    SequenceFailed,
    StepComputed,
    StepExecutor,
    StepTooLarge,
)
from gpu_worker.engines.paged.tensor_parallel import TensorParallelGroup
from gpu_worker.engines.paged.warmup_sequences import largest_step_sequences, warmup_sequences
from gpu_worker.engines.paged.weights.lora_manager import CheckDirectory, LoraManager, allow_all
from gpu_worker.engines.sequence_limits import SequenceLimits
from gpu_worker.engines.step_timer import measure
from streams.errors import BadGrammar
from streams.messages import Logprob

log = structlog.get_logger()

ADAPTER_BYTES = 1 << 30


class TransformersEngine:
    """An `Engine` with continuous batching over a loaded causal language model.

    One instance serves one model version, and one thread owns it. The tokens of a sequence do not
    depend on the other sequences of its batch. At most `max_sequences` run at the same time, and a
    step computes at most `max_batch_tokens` tokens of all sequences together. `kv_tokens` is the
    size of the KV cache in tokens; None takes as many as fit the free memory. `adapter_bytes`
    bounds the memory of all LoRA adapters together. `group` are the tensor parallel ranks; None is
    this process alone. Raises `ValueError` unless `max_batch_tokens` is above `max_sequences`.
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
        check_directory: CheckDirectory = allow_all,
    ) -> None:
        self._group = group or TensorParallelGroup()
        self._model, self._reference = loaded.model, loaded.reference
        self._vocabulary = TokenVocabulary(loaded.tokenizer, loaded.eos_ids)
        self._sampling_defaults = loaded.sampling_defaults
        if kv_tokens is None:
            spare_bytes = device_memory.kv_budget_bytes(loaded.model.device)
            kv_tokens = models.max_kv_tokens(loaded, max_sequences, max_batch_tokens, spare_bytes)
        self._blocks = blocks_for(kv_tokens)
        windows = {layer.window for layer in loaded.kv_layers}
        sizes = pool_sizes(windows, kv_tokens, max_sequences, max_batch_tokens)
        self._kv_cache = KvCacheManager(sizes, max_batch_tokens, prefix_cache)
        self._scheduler = Scheduler(self._kv_cache, max_sequences, max_batch_tokens)
        self._runner = ModelRunner(loaded, sizes)
        self._group.allocate_kv(sizes)
        self._adapters = LoraManager(self._model, adapter_bytes, check_directory)
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
        self.step_tokens: dict[str, int] = {}

    def warm_up(self) -> None:
        """Run prefill and decode over full and small batches, record CUDA graphs, reset counters.

        Called once before the engine serves; blocks until all of it is done, and leaves the prefix
        cache empty. Then compares what it computes with the loaded model's reference, if it has
        one. Raises `UnsupportedModel` when the model cannot compute a sequence, or computes another
        result, `DoesNotFit` when a step of `max_batch_tokens` tokens runs out of memory, and
        `DeviceLost`.
        """
        longest = min(self._max_batch_tokens, self._limits.tokens - 2)
        try:
            for sequence in warmup_sequences(longest, self._max_sequences):
                self.add(sequence)
            while not self.idle:
                self._step_or_raise()
            self._runner.capture_graphs()
            if self._reference:
                prove(self._reference, self._compute_forced, self._max_batch_tokens)
                self._reference = None
        except EngineError as error:
            name = type(self._model).__name__
            raise UnsupportedModel(f"{name} cannot run on this engine: {error}") from error
        self._kv_cache.reset_prefix_cache()
        self._scheduler.reset_counters()
        self._stats = EngineStats()

    def _compute_forced(self, texts: list[ForcedText], budget: int) -> list[list[Logprob]]:
        """Compute texts together in steps of `budget` tokens; return each continuation's values."""
        self._kv_cache.reset_prefix_cache()
        self._scheduler.token_budget = budget
        computed: dict[str, list[Logprob]] = {}
        for number, text in enumerate(texts):
            sequence = text.to_sequence(f"proof-{number}")
            self.add(sequence)
            if generating := self._sequences.get(sequence.request_id):
                generating.matcher = ForcedTokens(text.continuation)
            computed[sequence.request_id] = []
        while not self.idle:
            for output in self._step_unless_failed():
                computed[output.request_id] += output.logprobs or []
        self._scheduler.token_budget = self._max_batch_tokens
        return list(computed.values())

    def measure_step_bytes(self) -> int:
        """Run the largest step, and return the bytes that steps take beside weights and KV.

        The number is the sum of the peak of that step, in which all `max_batch_tokens` tokens are
        computed and a token is sampled for every sequence, and of what recorded decode steps keep.
        Afterwards the engine can only be closed. Raises the same errors as `warm_up`.
        """
        longest = self._limits.tokens
        for sequence in largest_step_sequences(
            self._max_batch_tokens, self._max_sequences, longest
        ):
            self.add(sequence)
        peak = device_memory.measure_peak_bytes(self._model.device, self._step_or_raise)
        return peak + self._runner.measure_graph_bytes()

    def _step_unless_failed(self) -> list[Output]:
        outputs = self.step()
        for output in outputs:
            if output.error:
                raise output.error
        return outputs

    def _step_or_raise(self) -> None:
        self._step_unless_failed()
        if self._scheduler.token_budget < self._max_batch_tokens:
            raise DoesNotFit(
                f"a step of {self._max_batch_tokens} tokens does not fit the memory beside the "
                "weights; lower --max-batch-tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Accept a sequence for the next steps, and return at once.

        A sequence that cannot run here (too long, empty, or with an adapter larger than the adapter
        memory) raises nothing: the next `step` returns an output with its `error`. A sequence with
        a grammar or an adapter starts once that is compiled or loaded; if that fails, a later
        `step` returns the error. The request id must not be in the engine already, which is
        asserted.
        """
        assert sequence.request_id not in self._sequences, f"{sequence.request_id} was added before"
        adapter = sequence.adapter
        if refusal := self._limits.find_refusal(sequence) or self._adapters.refusal(adapter):
            self._ready.append(Output(sequence.request_id, error=refusal))
            return
        generating = GeneratingSequence(
            sequence, self._vocabulary, self._model.device, self._sampling_defaults
        )
        if finish := generating.finish_reason():
            self._ready.append(generating.end_output(finish))
            return
        self._sequences[sequence.request_id] = generating
        self._reserved += generating.max_blocks
        if grammar := sequence.sampling.grammar:
            self._grammars.start_compiling(sequence.request_id, grammar)
        else:
            self._schedule(generating)

    def cancel(self, request_id: str) -> None:
        """Drop a sequence and release its KV; the next `step` returns its last output.

        That output has `finish` "cancelled" and the text that was still held back. Does nothing for
        an id that is unknown or has finished, so it can be called twice.
        """
        if generating := self._sequences.get(request_id):
            held_text = generating.text.finish()
            cached = generating.cached_tokens
            self._ready.append(
                Output(request_id, text=held_text, finish="cancelled", cached=cached)
            )
            is_waiting = self._grammars.stop_waiting(request_id) or self._adapters.is_waiting(
                request_id
            )
            if not is_waiting:
                self._scheduler.remove(generating.state)
            self._remove(generating)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Compute one forward pass, sample, and return the new outputs: a token each at most.

        Outputs of sequences that were cancelled, refused or found complete since the last step come
        with them. The list is empty when only parts of prompts were computed or nothing is due.
        Waits a few milliseconds for a grammar or an adapter when no sequence can run. The failure
        of one sequence is an output with `error`. Raises `DeviceLost` when the device or another
        tensor parallel rank is lost.
        """
        self._group.raise_if_lost()
        self._schedule_compiled()
        self._schedule_adapted()
        outputs, self._ready = self._ready, []
        with measure(self._stats, "schedule"):
            slices = self._scheduler.schedule()
            blocks_to_zero = self._kv_cache.pop_blocks_to_zero()
            self._group.zero_blocks(blocks_to_zero)
            self._runner.attention.zero_blocks(blocks_to_zero)
        self.step_tokens = {each.state.request_id: each.count for each in slices}
        if slices:
            self._stats.steps += 1
            outputs += self._execute(slices)
        elif not outputs:
            self._adapters.nap_while_loading()
        return outputs

    def free_capacity(self) -> FreeCapacity:
        """Return how many more sequences and KV tokens the engine can take; neither is below 0.

        Each sequence in the engine, running or waiting, reserves the KV of its prompt and of all
        its `max_tokens`. KV that only the prefix cache holds counts as free.
        """
        sequences = self._scheduler.max_running - len(self._sequences)
        tokens = (self._blocks - self._reserved) * BLOCK_TOKENS
        return FreeCapacity(max(0, sequences), max(0, tokens))

    def concurrency_limit(self) -> int:
        """Return the most sequences that may run at the same time.

        It is `max_sequences`, or the token budget of a step where that is lower: the budget is
        halved when a step runs out of memory, and recovers slowly. Safe to call from any thread.
        """
        return self._scheduler.max_running

    def cached_prefix_hashes(self) -> list[int]:
        """Return the hashes of cached prompt prefixes, then of the names of loaded LoRA adapters.

        The hashes of prefixes come least recently used first. `streams/prefix_hashes.py` defines
        both. Safe to call from any thread.
        """
        return [*self._kv_cache.prefix_hashes(), *self._adapters.loaded_hashes]

    @property
    def idle(self) -> bool:
        """True when the engine has no sequence and no output, so that `step` has nothing to do.

        It is False once another tensor parallel rank is lost, so that the caller does call `step`,
        which then raises `DeviceLost`.
        """
        return not self._sequences and not self._ready and not self._group.lost_reason

    @property
    def stats(self) -> EngineStats:
        """Counters since the warm-up, and KV use in tokens as of now.

        Always the same object once `warm_up` has returned. Safe to read from any thread.
        """
        stats, cache, scheduler = self._stats, self._kv_cache, self._scheduler
        stats.preemptions, stats.hit_tokens = scheduler.preemptions, scheduler.hit_tokens
        stats.query_tokens = scheduler.query_tokens
        stats.adapter_loads = self._adapters.load_count
        stats.kv_used = (cache.total_blocks - cache.available_blocks) * BLOCK_TOKENS
        stats.kv_cached = cache.cached_blocks * BLOCK_TOKENS
        stats.kv_free = (cache.available_blocks - cache.cached_blocks) * BLOCK_TOKENS
        return stats

    def close(self) -> None:
        """End the other ranks, drop all sequences, and free the memory of weights and KV.

        Dropped sequences get no output. Waits up to ten seconds for each rank before it is killed.
        The engine must not be used afterwards.
        """
        self._group.close()
        self.close_keeping_ranks()

    def close_keeping_ranks(self) -> None:
        """Do as `close` does, but leave the other ranks running for another engine.

        The weights stay in memory as long as the caller keeps the loaded model.
        """
        self._sequences.clear()
        self._ready.clear()
        self._adapters.close()
        self._runner.close()
        self._grammars.close()
        device = self._model.device
        del self._executor, self._runner, self._model
        device_memory.release_cached_memory(device)

    def _schedule(self, generating: GeneratingSequence) -> None:
        """Hand a sequence to the scheduler, or let it wait for its adapter first."""
        if generating.sequence.adapter:
            self._adapters.wait_for_adapter(generating.sequence)
        else:
            self._scheduler.add(generating.state)

    def _schedule_compiled(self) -> None:
        """Schedule the sequences whose grammar is compiled; it starts behind `generated` tokens."""
        nothing_else = not self._ready and self._scheduler.idle
        for request_id, compiled in self._grammars.pop_ready(may_wait=nothing_else).items():
            generating = self._sequences[request_id]
            if isinstance(compiled, BadGrammar):
                self._refuse(generating, EngineError(compiled.code, compiled.message))
                continue
            generating.matcher = compiled
            compiled.advance(generating.sequence.generated)
            if finish := generating.finish_reason():
                self._remove(generating)
                self._ready.append(generating.end_output(finish))
            else:
                self._schedule(generating)

    def _schedule_adapted(self) -> None:
        """Schedule the sequences whose adapter is loaded; refuse those whose adapter is not."""
        for request_id, error in self._adapters.pop_ready():
            generating = self._sequences[request_id]
            if error:
                self._refuse(generating, error)
            else:
                self._scheduler.add(generating.state)

    def _refuse(self, generating: GeneratingSequence, error: EngineError) -> None:
        """End a sequence whose grammar or adapter failed."""
        self._remove(generating)
        self._ready.append(Output(generating.sequence.request_id, error=error))

    def _execute(self, slices: list[SequenceSlice]) -> list[Output]:
        outputs: list[Output] = []
        for outcome in self._executor.execute(slices, self._stats):
            match outcome:
                case StepComputed():
                    outputs += self._commit(outcome)
                case StepTooLarge():
                    outputs += self._lower_budget(outcome)
                case SequenceFailed(state, reason):
                    outputs.append(self._fail(state, reason))
        return outputs

    def _commit(self, computed: StepComputed) -> list[Output]:
        with measure(self._stats, "report"):
            self._scheduler.commit(computed.slices)
            self._stats.prefilled += sum(s.count for s in computed.slices if not s.is_decode)
            return [self._append_token(state, sampled) for state, sampled in computed.sampled]

    def _lower_budget(self, step: StepTooLarge) -> list[Output]:
        """Halve the token budget; a sequence fails if even a single token does not fit."""
        if self._scheduler.halve_budget(step.slices):
            log.warning(
                "step_out_of_memory", budget=self._scheduler.token_budget, reason=step.reason
            )
            return []
        reason = f"out of memory with one token: {step.reason}"
        return [self._fail(step.slices[0].state, reason)]

    def _row_sampling(self, state: SequenceState) -> RowSampling:
        return self._sequences[state.request_id].row_sampling()

    def _append_token(self, state: SequenceState, sampled: SampledToken) -> Output:
        """Append a sampled token to its sequence and return the sequence's output."""
        token = sampled.token
        if token is None:
            return self._fail(state, "the model's output is not a number")
        generating = self._sequences[state.request_id]
        text = generating.append_token(token)
        if generating.matcher and (failure := generating.matcher.failure):
            return self._fail(state, failure, BadGrammar.code)
        self._stats.generated += 1
        if finish := generating.finish_reason():
            text += generating.text.finish()
            self._remove(generating)
            self._scheduler.remove(state)
        logprobs = self._vocabulary.to_logprobs(sampled)
        output = generating.end_output(finish) if finish else Output(state.request_id)
        return replace(output, tokens=[token], text=text, logprobs=logprobs)

    def _fail(self, state: SequenceState, reason: str, code: str = "engine_failed") -> Output:
        """Drop one sequence; its KV is zeroed before another sequence gets its blocks."""
        self._remove(self._sequences[state.request_id])
        self._scheduler.discard(state)
        return Output(state.request_id, error=EngineError(code, reason))

    def _remove(self, generating: GeneratingSequence) -> None:
        del self._sequences[generating.sequence.request_id]
        self._adapters.unpin(generating.sequence.request_id)
        self._reserved -= generating.max_blocks
