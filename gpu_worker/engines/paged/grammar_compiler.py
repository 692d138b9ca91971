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
from streams.grammars.llguidance_grammar import LIMITS, grammar_error, to_llguidance
from streams.messages import Grammar

MAX_COMPILED = 64  # compiled grammars that are kept
NAP_SECONDS = 0.002
_WORD_BITS = 32


class GrammarMatcher:
    """One sequence's position in its compiled grammar, which moves with each sampled token."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, eos_ids: list[int]) -> None:
        self._matcher, self._vocabulary, self._eos_ids = matcher, vocabulary, eos_ids

    @property
    def is_complete(self) -> bool:
        """True once the grammar allows no further token. False after a failure."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str | None:
        """The reason why the grammar can no longer be followed, as a sentence; None while it can.

        In most cases one token would take more work than llguidance's limits allow.
        """
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error().partition("\n")[0]
        return f"the output cannot follow its grammar any further: {reason[:200]}"

    def mask_logits(self, row: Tensor) -> None:
        """Set the logits of tokens that the grammar forbids next to minus infinity, in place.

        `row` is `[vocabulary]`. An end-of-sequence token is allowed only where the output so far is
        a complete text of the grammar. If matching fails in this call or has failed before, the row
        is left as it is and `failure` says why.
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
        """Advance the matcher past `tokens`, each of which must be allowed by the grammar.

        A token that is not allowed raises nothing and sets `failure`; further tokens then have no
        effect.
        """
        for token in tokens:
            self._matcher.consume_token(token)


class GrammarCompiler:
    """Compiles grammars in a thread of its own, and caches the `MAX_COMPILED` most recently used.

    An engine has one, and calls all methods from the engine's thread. If llguidance cannot read the
    model's tokeniser, every grammar fails with a `BadGrammar` that says so.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._eos_ids = sorted(eos_ids)
        self._tokenizer = _build_tokenizer(tokenizer, vocabulary, self._eos_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._waiting: dict[str, Future[LLMatcher]] = {}

    def start_compiling(self, request_id: str, grammar: Grammar) -> None:
        """Start compiling the grammar of a sequence, unless it is cached, and return at once.

        A later `pop_ready` returns the matcher, or the error, under this request id.
        """
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        self._waiting[request_id] = future

    def stop_waiting(self, request_id: str) -> bool:
        """Forget a sequence that waits for its grammar, so that `pop_ready` will not return it.

        Returns True if it was waiting, and False if the id is unknown or `pop_ready` has returned
        it. The grammar is compiled all the same, and cached.
        """
        return self._waiting.pop(request_id, None) is not None

    def pop_ready(self, may_wait: bool) -> dict[str, GrammarMatcher | BadGrammar]:
        """Return the waiting sequences whose grammar is done, by request id, each only once.

        The value is the sequence's matcher, or a `BadGrammar` if its grammar could not be compiled.
        With `may_wait` the call waits up to `NAP_SECONDS` (2 ms) for the first of them; otherwise
        it returns at once. The dict is empty if none is done.
        """
        if may_wait and self._waiting:
            wait(self._waiting.values(), NAP_SECONDS, FIRST_COMPLETED)
        done = {name: future for name, future in self._waiting.items() if future.done()}
        for name in done:
            del self._waiting[name]
        return {name: self._make_matcher(future) for name, future in done.items()}

    def close(self) -> None:
        """Stop the compiling thread without waiting for it; grammars not begun are dropped.

        A grammar that is being compiled runs to its end in the background.
        """
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
