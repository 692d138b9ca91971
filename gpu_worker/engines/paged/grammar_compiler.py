"""Grammars over a model's vocabulary: compiled in a thread, matched token by token.

A matcher's state is a function of the tokens so far, so a later attempt that replays the stored
tokens continues exactly.
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

MAX_COMPILED = 64  # compiled grammars that are kept
NAP_SECONDS = 0.002
_WORD_BITS = 32


class GrammarMatcher:
    """One sequence's position in its compiled grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, eos_ids: list[int]) -> None:
        self._matcher, self._vocabulary, self._eos_ids = matcher, vocabulary, eos_ids

    @property
    def is_complete(self) -> bool:
        """True once the grammar allows no further token."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str | None:
        """Why matching failed, or None; mostly because one token exceeded a limit on its work."""
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error().partition("\n")[0]
        return f"the output cannot follow its grammar any further: {reason[:200]}"

    def mask_logits(self, row: Tensor) -> None:
        """Set logits of tokens that may not come next to minus infinity: `[vocabulary]`, in place.

        An end-of-sequence token is allowed where the grammar accepts. After a failure nothing is
        masked.
        """
        words = -(-self._vocabulary // _WORD_BITS)
        bits = torch.zeros(
            words * _WORD_BITS // 8, dtype=torch.uint8, pin_memory=row.device.type == "cuda"
        )
        self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.numel())
        if self._matcher.is_error():
            return
        bit_positions = torch.arange(8, dtype=torch.uint8, device=row.device)
        allowed = (
            bits.to(row.device, non_blocking=True)[:, None]
            .bitwise_right_shift(bit_positions)
            .bitwise_and(1)
        )
        row.masked_fill_(allowed.flatten()[: len(row)] == 0, -torch.inf)
        if not self._matcher.is_accepting():  # some tokenisers' end tokens are also text
            row[self._eos_ids] = -torch.inf

    def advance(self, tokens: Iterable[int]) -> None:
        """Move the position behind `tokens`. An error shows in `failure`."""
        for token in tokens:
            self._matcher.consume_token(token)


class GrammarCompiler:
    """Compiles grammars in its own thread and caches the most recently used ones.

    All methods must be called from one thread. If llguidance cannot read the model's tokeniser,
    every sequence with a grammar fails with that reason.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._eos_ids = sorted(eos_ids)
        self._tokenizer = _build_tokenizer(tokenizer, vocabulary, self._eos_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._waiting: dict[str, Future[LLMatcher]] = {}

    def start_compiling(self, request_id: str, grammar: Grammar) -> None:
        """Start compiling a sequence's grammar; `pop_ready` returns the matcher or the error."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        self._waiting[request_id] = future

    def stop_waiting(self, request_id: str) -> bool:
        """Let a sequence no longer wait for its grammar; returns whether it was waiting."""
        return self._waiting.pop(request_id, None) is not None

    def pop_ready(self, may_wait: bool) -> dict[str, GrammarMatcher | BadGrammar]:
        """Return the matchers, or errors, that are done, by request id; each is returned once.

        `may_wait`: wait up to `NAP_SECONDS` for one if there are any to come.
        """
        if may_wait and self._waiting:
            wait(self._waiting.values(), NAP_SECONDS, FIRST_COMPLETED)
        done = {name: future for name, future in self._waiting.items() if future.done()}
        for name in done:
            del self._waiting[name]
        return {name: self._make_matcher(future) for name, future in done.items()}

    def close(self) -> None:
        """Stop the thread, and do not wait for a grammar that is being compiled."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make_matcher(self, future: Future[LLMatcher]) -> GrammarMatcher | BadGrammar:
        error = future.exception()
        if error is None:
            return GrammarMatcher(future.result().deep_copy(), self._vocabulary, self._eos_ids)
        if isinstance(error, BadGrammar):
            return error
        return BadGrammar(f"the grammar's compiler failed: {error!r}")  # fails this sequence alone

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if isinstance(self._tokenizer, BadGrammar):
            raise self._tokenizer
        matcher = LLMatcher(self._tokenizer, to_llguidance(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise grammar_error(grammar.kind, matcher.get_error())
        return matcher


def _build_tokenizer(
    tokenizer: Tokenizer, vocabulary: int, eos_ids: list[int]
) -> LLTokenizer | BadGrammar:
    """Build llguidance's tokeniser, which needs only the bytes of every token to make masks.

    So merges are left out: without them Gemma's tokeniser is read in a third of the time, and from
    8 MB instead of 130. Reading holds Python's lock, so it is done at the start and not during a
    request.
    """
    definition = orjson.loads(tokenizer.to_str())
    if "merges" in definition["model"]:
        definition["model"]["merges"] = []
    try:
        return LLTokenizer(orjson.dumps(definition).decode(), vocabulary, eos_ids or None)
    except ValueError as error:
        return BadGrammar(f"this model cannot follow grammars: {error}")
