"""A server of a test, on a real socket, that does to each call what the test has told it."""

import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tokenizers import Tokenizer, decoders, models

FULL = "Once the mill by the stream ground all the corn of the valley, and no one went hungry."
PROMPT = "Once "
ANSWER = FULL[len(PROMPT) :]


class Call(BaseHTTPRequestHandler):
    """One call; an `Act` answers it, in a thread of its own."""

    server: "Upstream"
    body: dict[str, Any]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.close_connection = True
        self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            self.server.next(self)(self)
        except (BrokenPipeError, ConnectionResetError):
            self.server.left.set()

    def log_message(self, format: str, *args: object) -> None:
        """Tests have no use for it."""

    def head(self, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("connection", "close")
        self.end_headers()

    def event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())

    def say(self, text: str, finish: str | None = None, **more: object) -> None:
        self.event({"choices": [{"text": text, "finish_reason": finish, **more}]})

    def reset(self) -> None:
        """Close the connection with a RST."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()


Act = Callable[[Call], None]


class Upstream(ThreadingHTTPServer):
    """Answers calls by its acts, one each; the last one answers all that follow."""

    daemon_threads = True

    def __init__(self, acts: tuple[Act, ...], port: int) -> None:
        self.acts = deque(acts)
        self.calls: list[Call] = []
        self.left, self.ending = threading.Event(), threading.Event()
        self._counting = threading.Lock()
        super().__init__(("127.0.0.1", port), Call)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next(self, call: Call) -> Act:
        with self._counting:
            self.calls.append(call)
            return self.acts.popleft() if len(self.acts) > 1 else self.acts[0]

    def handle_error(self, request: object, client_address: object) -> None:
        """A reset of our own ends in an error of the handler's."""


@contextmanager
def serving(*acts: Act, port: int = 0) -> Iterator[Upstream]:
    with Upstream(acts, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.ending.set()
        server.shutdown()
        thread.join()


def bytes_tokenizer() -> Tokenizer:
    """One whose ids are the bytes of ASCII."""
    made = Tokenizer(models.BPE({chr(byte): byte for byte in range(128)}, []))
    made.decoder = decoders.Fuse()
    return made


def words(text: str) -> list[str]:
    return text.replace(" ", " \0").split("\0") if text else []


def going_on(call: Call) -> list[str]:
    """The words that follow the prompt of a call, as many as it asks for."""
    assert FULL.startswith(call.body["prompt"]), call.body["prompt"]
    return words(FULL[len(call.body["prompt"]) :])[: call.body["max_tokens"]]


def streamed(call: Call) -> None:
    """The whole answer, as OpenAI streams it."""
    call.head(kind="text/event-stream")
    said = going_on(call)
    for word in said:
        call.say(word)
    complete = FULL.endswith("".join(said)) and len(said) < call.body["max_tokens"]
    call.say("", "stop" if complete else "length")
    asked = len(words(call.body["prompt"]))
    call.event({"choices": [], "usage": {"prompt_tokens": asked, "completion_tokens": len(said)}})
    call.event("[DONE]")


def broken_after(count: int, end: Callable[[Call], None] = Call.reset) -> Act:
    """So many words of the answer, then an end that is none."""

    def act(call: Call) -> None:
        call.head(kind="text/event-stream")
        for word in going_on(call)[:count]:
            call.say(word)
        end(call)

    return act


def status(code: int, body: object = None, **headers: str) -> Act:
    def act(call: Call) -> None:
        data = json.dumps(body).encode()
        call.head(code, content_length=str(len(data)), **headers)
        call.wfile.write(data)

    return act


def answered(make: Callable[[Mapping[str, Any]], object]) -> Act:
    """JSON that depends on the call's body."""

    def act(call: Call) -> None:
        call.head()
        call.wfile.write(json.dumps(make(call.body)).encode())

    return act


class Crowd:
    """An act whose first `size` calls go on only together; `most` were in it at once."""

    def __init__(self, act: Act, size: int) -> None:
        self._act, self._size = act, size
        self._barrier, self._counting = threading.Barrier(size), threading.Lock()
        self._came = self._inside = self.most = 0

    def __call__(self, call: Call) -> None:
        with self._counting:
            self._came += 1
            self._inside += 1
            self.most = max(self.most, self._inside)
            meets = self._came <= self._size
        if meets:
            self._barrier.wait(20)
        with self._counting:
            self._inside -= 1
        self._act(call)


def hang(call: Call) -> None:
    """Nothing, until the test ends."""
    call.server.ending.wait()


def hang_in_stream(call: Call) -> None:
    """The next event does not come until the test ends, whatever else does."""
    while not call.server.ending.wait(0.01):
        call.wfile.write(b": ping\n\n")


def ended(call: Call) -> None:
    """The connection is closed in order, with nothing more said."""
