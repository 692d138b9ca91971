"""A wire between two ends that a test can cut."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class TcpProxy:
    """Forwards connections to a server; `url` is its near end."""

    def __init__(self, far: str) -> None:
        address = urlsplit(far)
        self._far = (address.hostname or "", address.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def drop_connections(self) -> None:
        """Drop every connection; new ones are let through."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):  # closed by then
                end.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        """Accept until `close`."""
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._far)
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=(source, sink), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with source:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # cut


@contextmanager
def running_proxy(far: str) -> Iterator[TcpProxy]:
    """A wire that is served by a thread until the block ends."""
    laid = TcpProxy(far)
    server = threading.Thread(target=laid.serve)
    server.start()
    try:
        yield laid
    finally:
        laid.close()
        server.join()
