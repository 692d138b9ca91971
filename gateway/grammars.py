"""Grammars are checked before anything is queued, with the compiler that the workers use."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from streams import grammar
from streams.errors import BadGrammar
from streams.messages import Grammar

KNOWN = 256


class Grammars:
    """Checks in one thread, which bounds what costly grammars take; remembers the last. `close` it.

    The compiler gives up Python's lock, so the event loop goes on.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._fault = lru_cache(KNOWN)(_fault)

    async def check(self, wanted: Grammar, field: str) -> None:
        """Raise `BadGrammar`, naming the request's field, for what no worker could follow."""
        loop = asyncio.get_running_loop()
        if reason := await loop.run_in_executor(self._thread, self._fault, wanted):
            raise BadGrammar(reason, field)

    def close(self) -> None:
        """Let go of the thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _fault(wanted: Grammar) -> str | None:
    try:
        grammar.check(wanted)
    except BadGrammar as error:
        return error.message
    return None
