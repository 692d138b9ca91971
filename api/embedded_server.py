"""Mixin for uvicorn's server, for a process that handles signals itself."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class EmbeddedServer:
    """Mixin for `uvicorn.Server`, without signal handlers; it listens no longer than it serves.

    uvicorn itself would go on to listen after a cancellation.
    """

    servers: list[asyncio.Server] = []  # noqa: RUF012 # uvicorn sets its own at its start

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, and stop listening at the end of the `with` block."""
        try:
            yield
        finally:
            for server in self.servers:
                server.close()
