"""Grammars are checked before anything is queued, with the compiler that the workers use."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from streams import grammar
from streams.errors import BadGrammar
from streams.messages import Grammar

MAX_CACHED = 256


class GrammarChecker:
    """Checks in one thread, which bounds what costly grammars take; remembers the last. `close` it.

    The compiler gives up Python's lock, so the event loop goes on.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._find_fault = lru_cache(MAX_CACHED)(_find_fault)

    async def check(self, wanted: Grammar, field: str) -> None:
        """Raise `BadGrammar`, naming the request's field, for what no worker could follow."""
        loop = asyncio.get_running_loop()
        if reason := await loop.run_in_executor(self._executor, self._find_fault, wanted):
            raise BadGrammar(reason, field)

    def close(self) -> None:
        """Let go of the thread. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _find_fault(wanted: Grammar) -> str | None:
    try:
        grammar.check_grammar(wanted)
    except BadGrammar as error:
        return error.message
    return None
