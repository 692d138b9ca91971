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

FULL_TEXT = "Once the mill by the stream ground all the corn of the valley, and no one went hungry."
PROMPT = "Once "
ANSWER = FULL_TEXT[len(PROMPT) :]


class UpstreamCall(BaseHTTPRequestHandler):
    """One call; an `Act` answers it, in a thread of its own."""

    server: "StubUpstream"
    body: dict[str, Any]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.close_connection = True
        self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            self.server.next_responder(self)(self)
        except (BrokenPipeError, ConnectionResetError):
            self.server.client_left.set()

    def log_message(self, format: str, *args: object) -> None:
        """Tests have no use for it."""

    def send_head(self, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("connection", "close")
        self.end_headers()

    def send_event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())

    def send_text(self, text: str, finish: str | None = None, **more: object) -> None:
        self.send_event({"choices": [{"text": text, "finish_reason": finish, **more}]})

    def reset(self) -> None:
        """Close the connection with a RST."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()


Responder = Callable[[UpstreamCall], None]


class StubUpstream(ThreadingHTTPServer):
    """Answers calls by its acts, one each; the last one answers all that follow."""

    daemon_threads = True

    def __init__(self, acts: tuple[Responder, ...], port: int) -> None:
        self.responders = deque(acts)
        self.calls: list[UpstreamCall] = []
        self.client_left, self.is_ending = threading.Event(), threading.Event()
        self._counting = threading.Lock()
        super().__init__(("127.0.0.1", port), UpstreamCall)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_responder(self, call: UpstreamCall) -> Responder:
        with self._counting:
            self.calls.append(call)
            return self.responders.popleft() if len(self.responders) > 1 else self.responders[0]

    def handle_error(self, request: object, client_address: object) -> None:
        """A reset of our own ends in an error of the handler's."""


@contextmanager
def running_upstream(*acts: Responder, port: int = 0) -> Iterator[StubUpstream]:
    with StubUpstream(acts, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.is_ending.set()
        server.shutdown()
        thread.join()


def bytes_tokenizer() -> Tokenizer:
    """One whose ids are the bytes of ASCII."""
    made = Tokenizer(models.BPE({chr(byte): byte for byte in range(128)}, []))
    made.decoder = decoders.Fuse()
    return made


def split_words(text: str) -> list[str]:
    return text.replace(" ", " \0").split("\0") if text else []


def remaining_words(call: UpstreamCall) -> list[str]:
    """The words that follow the prompt of a call, as many as it asks for."""
    assert FULL_TEXT.startswith(call.body["prompt"]), call.body["prompt"]
    return split_words(FULL_TEXT[len(call.body["prompt"]) :])[: call.body["max_tokens"]]


def stream_answer(call: UpstreamCall) -> None:
    """The whole answer, as OpenAI streams it."""
    call.send_head(kind="text/event-stream")
    said = remaining_words(call)
    for word in said:
        call.send_text(word)
    complete = FULL_TEXT.endswith("".join(said)) and len(said) < call.body["max_tokens"]
    call.send_text("", "stop" if complete else "length")
    asked = len(split_words(call.body["prompt"]))
    call.send_event(
        {"choices": [], "usage": {"prompt_tokens": asked, "completion_tokens": len(said)}}
    )
    call.send_event("[DONE]")


def break_after(count: int, end: Callable[[UpstreamCall], None] = UpstreamCall.reset) -> Responder:
    """So many words of the answer, then an end that is none."""

    def act(call: UpstreamCall) -> None:
        call.send_head(kind="text/event-stream")
        for word in remaining_words(call)[:count]:
            call.send_text(word)
        end(call)

    return act


def respond_status(code: int, body: object = None, **headers: str) -> Responder:
    def act(call: UpstreamCall) -> None:
        data = json.dumps(body).encode()
        call.send_head(code, content_length=str(len(data)), **headers)
        call.wfile.write(data)

    return act


def respond_json(make: Callable[[Mapping[str, Any]], object]) -> Responder:
    """JSON that depends on the call's body."""

    def act(call: UpstreamCall) -> None:
        call.send_head()
        call.wfile.write(json.dumps(make(call.body)).encode())

    return act


class BarrierResponder:
    """An act whose first `size` calls go on only together; `most` were in it at once."""

    def __init__(self, act: Responder, size: int) -> None:
        self._act, self._size = act, size
        self._barrier, self._counting = threading.Barrier(size), threading.Lock()
        self._came = self._inside = self.max_concurrent = 0

    def __call__(self, call: UpstreamCall) -> None:
        with self._counting:
            self._came += 1
            self._inside += 1
            self.max_concurrent = max(self.max_concurrent, self._inside)
            meets = self._came <= self._size
        if meets:
            self._barrier.wait(20)
        with self._counting:
            self._inside -= 1
        self._act(call)


def hang(call: UpstreamCall) -> None:
    """Nothing, until the test ends."""
    call.server.is_ending.wait()


def hang_in_stream(call: UpstreamCall) -> None:
    """The next event does not come until the test ends, whatever else does."""
    while not call.server.is_ending.wait(0.01):
        call.wfile.write(b": ping\n\n")


def close_silently(call: UpstreamCall) -> None:
    """The connection is closed in order, with nothing more said."""
