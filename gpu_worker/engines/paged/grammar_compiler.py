"""Grammars over a model's vocabulary: compiled beside the engine's steps, followed token by token.

A matcher's state is a function of the tokens so far, so a later attempt replays those that are
stored and goes on exactly.
"""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import orjson
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from torch import Tensor

from streams.errors import BadGrammar
from streams.grammar import LIMITS, grammar_error, to_llguidance
from streams.messages import Grammar

MAX_COMPILED = 64  # compiled grammars
NAP_SECONDS = 0.002
_WORD_BITS = 32


class GrammarMatcher:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: list[int]) -> None:
        self._matcher, self._vocabulary, self._eos_ids = matcher, vocabulary, ends

    @property
    def is_complete(self) -> bool:
        """True once nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, if so: a limit on the work of one token, for the most part."""
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error().partition("\n")[0]
        return f"the output cannot follow its grammar any further: {reason[:200]}"

    def mask_logits(self, row: Tensor) -> None:
        """Ban in the logits `[vocabulary]`, in place, what the grammar does not allow next.

        An end of sequence is allowed where the grammar accepts. Nothing is banned after a failure.
        """
        words = -(-self._vocabulary // _WORD_BITS)
        bits = torch.zeros(
            words * _WORD_BITS // 8, dtype=torch.uint8, pin_memory=row.device.type == "cuda"
        )
        self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.numel())
        if self._matcher.is_error():
            return
        places = torch.arange(8, dtype=torch.uint8, device=row.device)
        allowed = (
            bits.to(row.device, non_blocking=True)[:, None]
            .bitwise_right_shift(places)
            .bitwise_and(1)
        )
        row.masked_fill_(allowed.flatten()[: len(row)] == 0, -torch.inf)
        if not self._matcher.is_accepting():  # some tokenisers' ends are also text
            row[self._eos_ids] = -torch.inf

    def advance(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._matcher.consume_token(token)


class GrammarCompiler:
    """Compiles in a thread of its own, and keeps what was used last. Its methods are one thread's.

    A model whose tokeniser llguidance cannot read has none: its sequences fail with the reason.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._eos_ids = sorted(ends)
        self._tokenizer = _build_tokenizer(tokenizer, vocabulary, self._eos_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._waiting: dict[str, Future[LLMatcher]] = {}

    def start_compiling(self, request_id: str, grammar: Grammar) -> None:
        """Have the grammar compiled for a sequence; `ready` has it, or why not, when it is done."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        self._waiting[request_id] = found

    def stop_waiting(self, request_id: str) -> bool:
        """Whether the sequence was waiting; it does no longer."""
        return self._waiting.pop(request_id, None) is not None

    def pop_ready(self, patient: bool) -> dict[str, GrammarMatcher | BadGrammar]:
        """What has been compiled, by sequence; `patient`: waits a moment for something."""
        if patient and self._waiting:
            wait(self._waiting.values(), NAP_SECONDS, FIRST_COMPLETED)
        done = {name: future for name, future in self._waiting.items() if future.done()}
        for name in done:
            del self._waiting[name]
        return {name: self._make_matcher(future) for name, future in done.items()}

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make_matcher(self, future: Future[LLMatcher]) -> GrammarMatcher | BadGrammar:
        error = future.exception()
        if error is None:
            return GrammarMatcher(future.result().deep_copy(), self._vocabulary, self._eos_ids)
        if isinstance(error, BadGrammar):
            return error
        return BadGrammar(f"the grammar's compiler failed: {error!r}")  # harms no other sequence

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if isinstance(self._tokenizer, BadGrammar):
            raise self._tokenizer
        matcher = LLMatcher(self._tokenizer, to_llguidance(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise grammar_error(grammar.kind, matcher.get_error())
        return matcher


def _build_tokenizer(
    tokenizer: Tokenizer, vocabulary: int, ends: list[int]
) -> LLTokenizer | BadGrammar:
    """The bytes of every token, from which llguidance makes masks.

    Only they are wanted: without its merges Gemma's tokeniser is read in a third of the time and
    of 8 MB instead of 130. That keeps Python's lock, hence at the start and not with a request.
    """
    definition = orjson.loads(tokenizer.to_str())
    if "merges" in definition["model"]:
        definition["model"]["merges"] = []
    try:
        return LLTokenizer(orjson.dumps(definition).decode(), vocabulary, ends or None)
    except ValueError as error:
        return BadGrammar(f"this model cannot follow grammars: {error}")
