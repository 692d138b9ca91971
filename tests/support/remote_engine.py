"""A remote engine over a server that plays a part, and what comes out of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.remote.engine import RemoteEngine
from streams.messages import Sampling
from tests.support.stub_upstream import PROMPT, Responder, StubUpstream, running_upstream

QUICK = {"retry_seconds": 0.001, "cooldown_seconds": 0.01}


@contextmanager
def open_engine(url: str, **options: Any) -> Iterator[RemoteEngine]:
    wanted = {"model": "corn", "context_length": 1000, **QUICK, **options}
    engine = RemoteEngine.load(None, url=url, **wanted)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def engine_and_server(
    *acts: Responder, **options: Any
) -> Iterator[tuple[RemoteEngine, StubUpstream]]:
    with running_upstream(*acts) as server, open_engine(server.url, **options) as engine:
        yield engine, server


def make_sequence(name: str = "r", prompt: str = PROMPT, **sampling: Any) -> Sequence:
    chosen = Sampling(**{"max_tokens": 100, **sampling})
    return Sequence(name, list(prompt.encode()), chosen)


def make_inputs(*texts: str, name: str = "r", dimensions: int | None = None) -> Sequence:
    encoded = [list(text.encode()) for text in texts]
    return Sequence(name, inputs=encoded, dimensions=dimensions)


def run_to_end(engine: RemoteEngine, *sequences: Sequence) -> dict[str, list[Output]]:
    """All outputs by request; nothing follows a request's end."""
    outputs: dict[str, list[Output]] = {each.request_id: [] for each in sequences}
    for each in sequences:
        engine.add(each)
    while not engine.idle:
        for output in engine.step():
            assert not any(o.finish or o.error for o in outputs[output.request_id])
            outputs[output.request_id].append(output)
    return outputs


def joined_text(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def only_error(outputs: list[Output]) -> tuple[str, str]:
    (failed,) = (output.error for output in outputs if output.error)
    return failed.code, str(failed)
