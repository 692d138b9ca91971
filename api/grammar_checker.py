"""Checks grammars before their requests are queued, with the compiler that the workers use."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from streams.errors import BadGrammar
from streams.grammars import llguidance_grammar
from streams.messages import Grammar

MAX_CACHED = 256  # checked grammars whose result is kept


class GrammarChecker:
    """Checks, before a request is queued, whether workers can enforce the grammar that it asks for.

    A grammar is compiled in the checker's one thread, which bounds the CPU time that costly
    grammars take. The compiler releases Python's lock, so the event loop is not blocked. The last
    `MAX_CACHED` results are kept. The owner must call `close` at the end.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._find_fault = lru_cache(MAX_CACHED)(_find_fault)

    async def check(self, requested: Grammar, field: str) -> None:
        """Compile a grammar and raise `BadGrammar` with the reason if workers could not enforce it.

        `field` is the request's field that held the grammar; the error names it. Waits until the
        thread has compiled this grammar and those asked for before; cancelling stops the wait, not
        a compilation that has begun.
        """
        loop = asyncio.get_running_loop()
        if reason := await loop.run_in_executor(self._executor, self._find_fault, requested):
            raise BadGrammar(reason, field)

    def close(self) -> None:
        """Stop the thread and return at once. Idempotent.

        A check that has begun goes on to its end in the thread; checks that have not begun are
        cancelled.
        """
        self._executor.shutdown(wait=False, cancel_futures=True)


def _find_fault(requested: Grammar) -> str | None:
    """Return why no worker can follow a grammar, or None; `lru_cache` caches no exceptions."""
    try:
        llguidance_grammar.check_grammar(requested)
    except BadGrammar as error:
        return error.message
    return None
