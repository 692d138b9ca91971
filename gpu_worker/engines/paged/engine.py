"""The transformers engine. One step: schedule, one packed forward pass, sample, report."""

import structlog
import torch

from gpu_worker.engine import DoesNotFit, EngineError, Output, Room, Sequence
from gpu_worker.engines import memory
from gpu_worker.engines.paged import model as models
from gpu_worker.engines.paged.adapters import Adapters
from gpu_worker.engines.paged.blocks import BLOCK_TOKENS, blocks_for
from gpu_worker.engines.paged.cache import Cache, pool_sizes
from gpu_worker.engines.paged.computation import Computation, Computed, Failed, TooLarge
from gpu_worker.engines.paged.fitting import largest_step, warm_up
from gpu_worker.engines.paged.forward import ForwardPass
from gpu_worker.engines.paged.generation import Generation, Vocabulary
from gpu_worker.engines.paged.grammars import Grammars
from gpu_worker.engines.paged.parallel import Group
from gpu_worker.engines.paged.run import Run, Slice
from gpu_worker.engines.paged.sampler import Choice, Sampled
from gpu_worker.engines.paged.scheduler import Scheduler
from gpu_worker.limits import Limits
from gpu_worker.stats import Stats
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
        loaded: models.Loaded,
        max_sequences: int = 64,
        max_batch_tokens: int = 512,
        kv_tokens: int | None = None,
        prefix_cache: bool = True,
        adapter_bytes: int = ADAPTER_BYTES,
        group: Group | None = None,
    ) -> None:
        self._group = group or Group()
        self._model = loaded.model
        self._vocabulary = Vocabulary(loaded.tokenizer, loaded.ends)
        if kv_tokens is None:
            spare = memory.spare_bytes(loaded.model.device)
            kv_tokens = models.kv_tokens_for(loaded, max_sequences, max_batch_tokens, spare)
        self._blocks = blocks_for(kv_tokens)
        windows = {layer.window for layer in loaded.layers}
        sizes = pool_sizes(windows, kv_tokens, max_sequences, max_batch_tokens)
        self._cache = Cache(sizes, max_batch_tokens, prefix_cache)
        self._scheduler = Scheduler(self._cache, max_sequences, max_batch_tokens)
        self._forward = ForwardPass(loaded, sizes)
        self._group.allot(sizes)
        self._adapters = Adapters(self._model, adapter_bytes)
        self._computation = Computation(self._forward, self._adapters, self._group, self._choice)
        longest = min(loaded.context, self._blocks * BLOCK_TOKENS)
        self._limits = Limits(loaded.vocabulary, longest, adapters=self._group.size == 1)
        self._grammars = Grammars(loaded.tokenizer, loaded.vocabulary, loaded.ends)
        self._max_sequences, self._max_batch_tokens = max_sequences, max_batch_tokens
        if self._group.size == 1:
            self._forward.plan_recording(max_sequences, longest)
        self._generations: dict[str, Generation] = {}
        self._reserved = 0
        self._ready: list[Output] = []
        self._stats = Stats()

    def warm_up(self) -> None:
        """Run prefill and decode over full and small batches, then forget them.

        Raises the error of a model that cannot run at all.
        """
        longest = min(self._max_batch_tokens, self._limits.tokens - 2)
        for sequence in warm_up(longest, self._max_sequences):
            self.add(sequence)
        while not self.idle:
            self._step_or_raise()
        self._forward.record()
        self._cache.forget()
        self._scheduler.count_anew()
        self._stats = Stats()

    def step_bytes(self) -> int:
        """What steps take beside weights and KV, measured; the engine is of no use after it.

        The largest has all tokens and all samples; recorded decode steps keep what theirs took.
        """
        longest = self._limits.tokens
        for sequence in largest_step(self._max_batch_tokens, self._max_sequences, longest):
            self.add(sequence)
        peak = memory.peak_bytes(self._model.device, self._step_or_raise)
        return peak + self._forward.recorded_bytes()

    def _step_or_raise(self) -> None:
        for output in self.step():
            if output.error:
                raise output.error
        if self._scheduler.budget < self._max_batch_tokens:
            raise DoesNotFit(
                f"a step of {self._max_batch_tokens} tokens does not fit the memory beside the "
                "weights; lower --max-batch-tokens"
            )

    def add(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self._generations, f"{sequence.request_id} is here"
        adapter = sequence.adapter
        if refusal := self._limits.refusal(sequence) or self._adapters.refusal(adapter):
            self._ready.append(Output(sequence.request_id, error=refusal))
            return
        generation = Generation(sequence, self._vocabulary, self._model.device)
        if finish := generation.finish():
            self._ready.append(Output(sequence.request_id, finish=finish))
            return
        self._generations[sequence.request_id] = generation
        self._reserved += generation.blocks
        if grammar := sequence.sampling.grammar:
            self._grammars.begin(sequence.request_id, grammar)
        else:
            self._schedule(generation)

    def cancel(self, request_id: str) -> None:
        if generation := self._generations.get(request_id):
            held = generation.text.finish()
            cached = generation.cached
            self._ready.append(Output(request_id, text=held, finish="cancelled", cached=cached))
            waits = self._grammars.forget(request_id) or self._adapters.waits(request_id)
            if not waits:
                self._scheduler.remove(generation.run)
            self._leave(generation)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        self._group.check()
        self._join()
        self._enter()
        outputs, self._ready = self._ready, []
        with self._stats.timed("schedule"):
            slices = self._scheduler.schedule()
            unclean = self._cache.unclean()
            self._group.zero(unclean)
            self._forward.attention.zero(unclean)
        if slices:
            self._stats.steps += 1
            self._stats.sequences = len(slices)
            outputs += self._run(slices)
        elif not outputs:
            self._adapters.rest()
        return outputs

    def room(self) -> Room:
        sequences = self._scheduler.max_running - len(self._generations)
        tokens = (self._blocks - self._reserved) * BLOCK_TOKENS
        return Room(max(0, sequences), max(0, tokens))

    def capacity(self) -> int:
        """Sequences that may run at once: less than at first while steps do not fit the memory."""
        return self._scheduler.max_running

    def holds(self) -> list[int]:
        """The marks of cached prefixes and loaded adapters."""
        return [*self._cache.marks(), *self._adapters.marks]

    @property
    def idle(self) -> bool:
        return not self._generations and not self._ready and not self._group.lost

    @property
    def stats(self) -> Stats:
        """Counters and gauges as of now; the same object each time."""
        stats, cache, scheduler = self._stats, self._cache, self._scheduler
        stats.preemptions, stats.hit_tokens = scheduler.preemptions, scheduler.hit_tokens
        stats.query_tokens = scheduler.query_tokens
        stats.adapter_loads = self._adapters.loads
        stats.kv_used = (cache.count - cache.available) * BLOCK_TOKENS
        stats.kv_cached = cache.cached * BLOCK_TOKENS
        stats.kv_free = (cache.available - cache.cached) * BLOCK_TOKENS
        return stats

    def close(self) -> None:
        """End the other ranks, forget every sequence, give back the memory of weights and KV."""
        self._group.close()
        self.release()

    def release(self) -> None:
        """As `close`, but the other ranks stay, for another engine."""
        self._generations.clear()
        self._ready.clear()
        self._adapters.close()
        self._forward.close()
        self._grammars.close()
        device = self._model.device
        del self._computation, self._forward, self._model
        memory.give_back(device)

    def _schedule(self, generation: Generation) -> None:
        """Let a sequence run as soon as its adapter is there."""
        if generation.sequence.adapter:
            self._adapters.want(generation.sequence)
        else:
            self._scheduler.add(generation.run)

    def _join(self) -> None:
        """Schedule those whose grammar has been compiled, behind their `generated` tokens."""
        nothing_else = not self._ready and self._scheduler.idle
        for request_id, found in self._grammars.ready(patient=nothing_else).items():
            generation = self._generations[request_id]
            if isinstance(found, BadGrammar):
                self._refuse(generation, EngineError(found.code, found.message))
                continue
            generation.matcher = found
            found.advance(generation.sequence.generated)
            if finish := generation.finish():
                self._leave(generation)
                self._ready.append(Output(request_id, finish=finish))
            else:
                self._schedule(generation)

    def _enter(self) -> None:
        """Schedule those whose adapter has come."""
        for request_id, error in self._adapters.ready():
            generation = self._generations[request_id]
            if error:
                self._refuse(generation, error)
            else:
                self._scheduler.add(generation.run)

    def _refuse(self, generation: Generation, error: EngineError) -> None:
        """End a sequence that cannot have what it waited for."""
        self._leave(generation)
        self._ready.append(Output(generation.sequence.request_id, error=error))

    def _run(self, slices: list[Slice]) -> list[Output]:
        outputs: list[Output] = []
        for outcome in self._computation.outcomes(slices, self._stats):
            match outcome:
                case Computed():
                    outputs += self._report(outcome)
                case TooLarge():
                    outputs += self._shrink(outcome)
                case Failed(run, reason):
                    outputs.append(self._fail(run, reason))
        return outputs

    def _report(self, computed: Computed) -> list[Output]:
        with self._stats.timed("report"):
            self._scheduler.commit(computed.slices)
            self._stats.prefilled += sum(s.count for s in computed.slices if not s.is_decode)
            return [self._advance(run, sampled) for run, sampled in computed.sampled]

    def _shrink(self, step: TooLarge) -> list[Output]:
        """Have the next steps compute less; a single token that does not fit fails."""
        if self._scheduler.lower(step.slices):
            log.warning("step_out_of_memory", budget=self._scheduler.budget, reason=step.reason)
            return []
        reason = f"out of memory with one token: {step.reason}"
        return [self._fail(step.slices[0].run, reason)]

    def _choice(self, run: Run) -> Choice:
        return self._generations[run.request_id].choice()

    def _advance(self, run: Run, sampled: Sampled) -> Output:
        """Append a token to its sequence and say what that made of it."""
        token = sampled.token
        if token is None:
            return self._fail(run, "the model's output is not a number")
        generation = self._generations[run.request_id]
        text = generation.push(token)
        if generation.matcher and (failure := generation.matcher.failure):
            return self._fail(run, failure, BadGrammar.code)
        self._stats.generated += 1
        if finish := generation.finish():
            text += generation.text.finish()
            self._leave(generation)
            self._scheduler.remove(run)
        logprobs = self._vocabulary.logprobs(sampled)
        cached = generation.cached if finish else 0
        return Output(run.request_id, [token], text, logprobs, finish=finish, cached=cached)

    def _fail(self, run: Run, reason: str, code: str = "engine_failed") -> Output:
        """Drop a sequence alone; its KV is cleared before anybody else has its blocks."""
        self._leave(self._generations[run.request_id])
        self._scheduler.discard(run)
        return Output(run.request_id, error=EngineError(code, reason))

    def _leave(self, generation: Generation) -> None:
        del self._generations[generation.sequence.request_id]
        self._adapters.leave(generation.sequence.request_id)
        self._reserved -= generation.blocks
