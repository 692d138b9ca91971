"""A wire between two ends of TCP that can be parted: its bytes stop, and nobody is told."""

import asyncio
from contextlib import closing, suppress


class StallingProxy:
    """Forwards connections to `port`; `near` is where to connect instead. All on 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._far = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def stall(self) -> None:
        """As a network that drops every packet; connections stay open and new ones hang."""
        self._whole.clear()

    def resume(self) -> None:
        """What was on its way arrives, where both ends still wait for it."""
        self._whole.set()

    async def aclose(self) -> None:
        """Both ends of every connection are closed when this returns."""
        if self._server:
            self._server.close()
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._serve(reader, writer), name="link")
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await self._whole.wait()
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._far)
            except OSError:
                return
            with closing(far_writer):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._copy(reader, far_writer))
                    tasks.create_task(self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # one end is gone; the other one hears of it
            while data := await reader.read(65536):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        await self._whole.wait()
        writer.close()
