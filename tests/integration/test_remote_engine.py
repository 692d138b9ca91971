"""The remote engine against servers that fail in every way they can, on real sockets."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.engine import Output, Sequence
from gpu_worker.engines.remote.engine import KeyMissing, RemoteEngine
from streams.messages import Grammar, Sampling
from tests.upstream import (
    ANSWER,
    FULL,
    PROMPT,
    Act,
    Call,
    Crowd,
    Upstream,
    answered,
    broken_after,
    bytes_tokenizer,
    ended,
    hang,
    hang_in_stream,
    serving,
    status,
    streamed,
    words,
)

QUICK = {"retry_seconds": 0.001, "cooldown_seconds": 0.01}


@contextmanager
def engine_of(url: str, **options: Any) -> Iterator[RemoteEngine]:
    wanted = {"model": "corn", "context_length": 1000, **QUICK, **options}
    engine = RemoteEngine.load(None, url=url, **wanted)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def engine_and_server(*acts: Act, **options: Any) -> Iterator[tuple[RemoteEngine, Upstream]]:
    with serving(*acts) as server, engine_of(server.url, **options) as engine:
        yield engine, server


def sequence(name: str = "r", prompt: str = PROMPT, **sampling: Any) -> Sequence:
    chosen = Sampling(**{"max_tokens": 100, **sampling})
    return Sequence(name, list(prompt.encode()), chosen)


def inputs(*texts: str, name: str = "r", dimensions: int | None = None) -> Sequence:
    encoded = [list(text.encode()) for text in texts]
    return Sequence(name, inputs=encoded, dimensions=dimensions)


def run(engine: RemoteEngine, *sequences: Sequence) -> dict[str, list[Output]]:
    """All outputs by request; nothing follows a request's end."""
    outputs: dict[str, list[Output]] = {each.request_id: [] for each in sequences}
    for each in sequences:
        engine.add(each)
    while not engine.idle:
        for output in engine.step():
            assert not any(o.finish or o.error for o in outputs[output.request_id])
            outputs[output.request_id].append(output)
    return outputs


def text(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def error(outputs: list[Output]) -> tuple[str, str]:
    (failed,) = (output.error for output in outputs if output.error)
    return failed.code, str(failed)


def test_a_stream_becomes_outputs() -> None:
    """Text in order, a token for each event, the reason, and the server's own count."""
    with engine_and_server(streamed) as (engine, server):
        outputs = run(engine, sequence())["r"]
    assert text(outputs) == ANSWER
    assert sum(len(output.tokens) for output in outputs) == len(words(ANSWER))
    assert outputs[-1].finish == "stop"
    assert outputs[-1].usage
    assert outputs[-1].usage.completion_tokens == len(words(ANSWER))
    assert server.calls[0].path == "/completions"


def test_how_to_sample_is_forwarded() -> None:
    """And nothing that was not asked for: strict servers refuse fields that they do not know."""
    grammar = Grammar("json_schema", '{"type": "object"}')
    with engine_and_server(streamed) as (engine, server):
        full: dict[str, Any] = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "stop": ["\0"],
            "logprobs": 2,
        }
        run(engine, sequence("full", **full, seed=5, ignore_eos=True, grammar=grammar))
        run(engine, sequence("plain"))
    body, plain = (call.body for call in server.calls)
    assert {name: body[name] for name in full} == full
    assert (body["seed"], body["ignore_eos"], body["max_tokens"]) == (5, True, 100)
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert plain.keys() == body.keys() - {
        "top_k", "stop", "logprobs", "ignore_eos", "response_format",
    }  # fmt: skip


def test_a_request_without_a_seed_has_the_same_one_at_every_attempt() -> None:
    """A retry, or another worker, asks the server for the same draw."""
    with engine_and_server(status(503), streamed) as (engine, server):
        run(engine, sequence())
    first, second = (call.body["seed"] for call in server.calls)
    assert first == second


@pytest.mark.parametrize("code", [408, 425, 429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_tried_again(code: int) -> None:
    """The client learns nothing of it."""
    with engine_and_server(status(code), status(code), streamed) as (engine, server):
        outputs = run(engine, sequence())["r"]
    assert text(outputs) == ANSWER
    assert len(server.calls) == 3


@pytest.mark.parametrize("end", [Call.reset, ended], ids=["reset", "closed"])
def test_a_connection_that_breaks_before_the_first_token_is_tried_again(end: Act) -> None:
    """Nothing was seen of the answer, so it can be begun anew."""
    with engine_and_server(end, broken_after(0, end), streamed) as (engine, _):
        assert text(run(engine, sequence())["r"]) == ANSWER


@pytest.mark.parametrize("end", [Call.reset, ended, hang_in_stream], ids=lambda end: end.__name__)
def test_a_stream_that_breaks_goes_on_where_it_was(end: Act) -> None:
    """Behind exactly what was emitted, with what is left of max_tokens: no gap and no repeat."""
    acts = [broken_after(3, end), broken_after(2, end), streamed]
    with engine_and_server(*acts, chunk_seconds=0.3) as (engine, server):
        outputs = run(engine, sequence(max_tokens=10))["r"]
    said = words(ANSWER)
    assert text(outputs) == "".join(said[:10])
    assert outputs[-1].finish == "length"
    assert [call.body["max_tokens"] for call in server.calls] == [10, 7, 5]
    assert server.calls[2].body["prompt"] == PROMPT + "".join(said[:5])
    assert outputs[-1].usage
    assert outputs[-1].usage.completion_tokens == 10
    assert outputs[-1].usage.prompt_tokens == len(words(PROMPT))


def test_another_attempt_goes_on_behind_what_was_stored() -> None:
    """A worker that died has left its tokens and their text in the log."""
    said = words(ANSWER)
    begun = sequence(max_tokens=10)
    stored = Sequence("r", begun.prompt, begun.sampling, [0] * 4, "".join(said[:4]))
    with engine_and_server(streamed) as (engine, server):
        outputs = run(engine, stored)["r"]
    assert text(outputs) == "".join(said[4:10])
    assert server.calls[0].body["max_tokens"] == 6


def test_stop_strings_hold_across_a_break() -> None:
    """The server that goes on has not seen the beginning of one."""
    acts = [broken_after(3), streamed]  # the / mill / by
    with engine_and_server(*acts) as (engine, _):
        outputs = run(engine, sequence(stop=["by the stream"]))["r"]
    assert text(outputs) == "the mill "
    assert outputs[-1].finish == "stop"


def garbage(call: Call) -> None:
    call.head(kind="text/event-stream")
    call.event("{no json")


def html(call: Call) -> None:
    call.head(kind="text/html")
    call.wfile.write(b"<html>welcome</html>")


def no_http(call: Call) -> None:
    call.wfile.write(b"SSH-2.0-corn\r\n\r\n")


def its_own_error(call: Call) -> None:
    broken_after(2, lambda c: c.event({"error": {"message": "out of memory", "code": 500}}))(call)


@pytest.mark.parametrize("act", [garbage, html, no_http, its_own_error])
def test_nonsense_is_tried_again(act: Act) -> None:
    """A proxy that starts, a server that falls: the next call may be better."""
    with engine_and_server(act, streamed) as (engine, _):
        assert text(run(engine, sequence())["r"]) == ANSWER


@pytest.mark.parametrize("act", [garbage, html, no_http, status(500), Call.reset, hang])
def test_a_request_that_may_be_the_cause_is_not_tried_for_ever(act: Act) -> None:
    """One that crashes the server must not keep it down."""
    with engine_and_server(act, first_seconds=0.2) as (engine, server):
        code, _ = error(run(engine, sequence())["r"])
    assert code == "upstream_failed"
    assert len(server.calls) == 4


def test_a_refusal_is_the_requests_own_and_never_tried_again() -> None:
    """The client gets the server's reason, and others are unharmed."""
    refusal = status(400, {"error": {"message": "max_tokens is too large"}})
    with engine_and_server(refusal, streamed) as (engine, server):
        code, message = error(run(engine, sequence("bad"))["bad"])
        assert text(run(engine, sequence("good"))["good"]) == ANSWER
    assert (code, len(server.calls)) == ("upstream_refused", 2)
    assert "max_tokens is too large" in message


def test_what_has_no_field_in_the_api_fails_without_a_call() -> None:
    """A constraint that is left out in silence would be a wrong answer."""
    with engine_and_server(streamed) as (engine, server):
        code, _ = error(run(engine, sequence(grammar=Grammar("regex", "a+")))["r"])
    assert (code, server.calls) == ("unsupported_value", [])


def test_a_wrong_key_is_no_fault_of_the_client() -> None:
    """It cannot change the request so that it would pass."""
    with engine_and_server(status(401, {"error": "bad key"})) as (engine, _):
        code, _ = error(run(engine, sequence())["r"])
    assert code == "upstream_failed"


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry, which everybody may read, has only the variable's name."""
    monkeypatch.setenv("CORN_KEY", "sk-corn")
    with engine_and_server(streamed, api_key_variable="CORN_KEY") as (engine, server):
        run(engine, sequence())
    assert server.calls[0].headers["authorization"] == "Bearer sk-corn"
    monkeypatch.delenv("CORN_KEY")
    with pytest.raises(KeyMissing, match="CORN_KEY"):
        RemoteEngine.load(None, url="x", model="m", context_length=1, api_key_variable="CORN_KEY")


def test_no_more_calls_at_once_than_the_limit() -> None:
    """The others wait in the engine for a moment, beyond it they are never pulled."""
    crowd = Crowd(streamed, 3)
    with engine_and_server(crowd, concurrency=3) as (engine, _):
        assert (engine.room().sequences, engine.capacity()) == (3, 3)
        requests = [sequence(f"r{n}") for n in range(20)]
        outputs = run(engine, *requests)
    assert {text(each) for each in outputs.values()} == {ANSWER}
    assert crowd.most == 3


def test_a_cancelled_request_hangs_up() -> None:
    """The server need not go on for nobody, and its place is free."""
    with engine_and_server(broken_after(1, hang_in_stream), streamed, concurrency=1) as (
        engine,
        server,
    ):
        engine.add(sequence())
        while not engine.step():
            pass
        engine.cancel("r")
        engine.cancel("r")
        (output,) = engine.step()
        assert output.finish == "cancelled"
        assert engine.idle
        assert server.left.wait(10)
        assert text(run(engine, sequence())["r"]) == ANSWER


def test_while_the_server_is_away_nothing_is_announced_and_nothing_fails() -> None:
    """What is held waits; when the server comes back it is served."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with engine_of(f"http://127.0.0.1:{port}", cooldown_seconds=0.05) as engine:
        requests = [sequence(f"r{n}") for n in range(8)]
        for each in requests:
            engine.add(each)
        while engine.capacity() > 0:
            assert engine.step() == []
        outputs: list[Output] = []
        with serving(streamed, port=port):
            while not engine.idle:
                outputs += engine.step()
    assert sorted(o.request_id for o in outputs if o.finish == "stop") == [
        each.request_id for each in requests
    ]
    assert {text([o for o in outputs if o.request_id == f"r{n}"]) for n in range(8)} == {ANSWER}


def test_a_retry_after_lowers_the_credit() -> None:
    """The server has asked not to be asked: the work is not for this worker now."""
    with engine_and_server(status(429, retry_after="300")) as (engine, server):
        engine.add(sequence())
        while engine.capacity():
            engine.step()
        assert len(server.calls) == 1
        engine.cancel("r")


def token_ids(call: Call) -> None:
    """As vLLM: each event tells its tokens' ids; here the answer's bytes, two at a time."""
    prompt: list[int] = call.body["prompt"]
    rest = list(FULL.encode())[len(prompt) :][: call.body["max_tokens"]]
    assert bytes(prompt).decode() == FULL[: len(prompt)]
    call.head(kind="text/event-stream")
    pairs = [rest[at : at + 2] for at in range(0, len(rest), 2)]
    for pair in pairs[:3] if len(call.server.calls) < 3 else pairs:
        call.say(bytes(pair).decode(), token_ids=pair)
    if len(call.server.calls) >= 3:
        call.say("", "length", token_ids=[])


def test_token_ids_are_kept_where_the_server_tells_them(tmp_path: Path) -> None:
    """As from an engine of our own: text is made of them, and a break continues behind them."""
    bytes_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with serving(token_ids) as server:
        engine = RemoteEngine.load(
            tmp_path, url=server.url, api="vllm", model="corn", context_length=99, retry_seconds=0.0
        )
        outputs = run(engine, sequence(max_tokens=20, stop=["ground"]))["r"]
        engine.close()
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == list(ANSWER.encode())[:20]
    assert text(outputs) == ANSWER[:20]
    assert [len(call.body["prompt"]) for call in server.calls] == [5, 11, 17]
    assert server.calls[0].body["return_token_ids"]


def generated(body: Any) -> object:
    return [{"generated_text": body["inputs"].upper() + "END more"}]


def test_a_single_item_api_generates() -> None:
    """A whole text at once, cut at its stop string, which such APIs leave in."""
    with engine_and_server(status(503), answered(generated), api="single") as (engine, server):
        outputs = run(engine, sequence(temperature=0, stop=["END"], max_tokens=9))["r"]
    assert (text(outputs), outputs[-1].finish) == (PROMPT.upper(), "stop")
    parameters = server.calls[1].body["parameters"]
    assert (parameters["max_new_tokens"], parameters["do_sample"]) == (9, False)
    assert parameters["stop"] == ["END"]


def row(body: Any) -> object:
    return [float(len(body["inputs"])), 2.0, 2.0]


def test_a_single_item_api_embeds_each_input_in_order() -> None:
    """One call each, as many at once as are allowed."""
    texts = ["x" * (n + 1) for n in range(30)]
    crowd = Crowd(answered(row), 4)
    with engine_and_server(crowd, api="single", concurrency=4) as (engine, server):
        (output,) = run(engine, inputs(*texts))["r"]
    assert output.vectors
    assert [struct.unpack("<3f", vector)[0] for vector in output.vectors] == [*range(1, 31)]
    assert len(server.calls) == 30
    assert crowd.most == 4


def picky(call: Call) -> None:
    refused = "bad" in call.body["inputs"]
    (status(422, {"error": "bad input"}) if refused else answered(lambda body: [row(body)]))(call)


def test_a_failed_input_fails_its_own_request_only() -> None:
    """Its other inputs are not asked for any more; the neighbours do not notice."""
    with engine_and_server(picky, api="single", concurrency=2) as (engine, _):
        good, bad = inputs("a", "b", name="good"), inputs("a", "bad", *"cdefgh", name="bad")
        outputs = run(engine, bad, good)
    assert error(outputs["bad"])[0] == "upstream_refused"
    assert outputs["good"][0].vectors
    assert len(outputs["good"][0].vectors) == 2


def test_vectors_are_cut_to_the_dimensions_that_were_asked_for() -> None:
    """And are of length one again."""
    with engine_and_server(answered(lambda _: [3.0, 4.0, 9.0]), api="single") as (engine, _):
        (output,) = run(engine, inputs("a", dimensions=2))["r"]
        assert error(run(engine, inputs("a", dimensions=4))["r"])[0] == "unsupported_value"
    assert output.vectors
    assert struct.unpack("<2f", output.vectors[0]) == pytest.approx((0.6, 0.8))


@pytest.mark.parametrize("answer", [{}, [], [[1.0], [2.0]], ["x"], [None]])
def test_an_answer_without_a_vector_is_an_error(answer: object) -> None:
    """Never a vector that somebody made up."""
    with engine_and_server(answered(lambda _: answer), api="single") as (engine, _):
        assert error(run(engine, inputs("a"))["r"])[0] == "upstream_failed"


def embeddings(body: Any) -> object:
    rows = [{"index": i, "embedding": [float(i), 1.0]} for i in range(len(body["input"]))]
    return {"data": rows[::-1]}


def test_an_openai_server_embeds_all_inputs_by_one_call() -> None:
    """In the order of their indices."""
    with engine_and_server(answered(embeddings)) as (engine, server):
        (output,) = run(engine, inputs("a", "b", "c"))["r"]
    assert output.vectors
    assert [struct.unpack("<2f", vector)[0] for vector in output.vectors] == [0, 1, 2]
    assert server.calls[0].body["input"] == ["a", "b", "c"]
    assert server.calls[0].path == "/embeddings"


def test_closing_ends_every_thread() -> None:
    """Also with calls under way, and with some that wait to be made again."""
    before = threading.active_count()
    with serving(hang) as server:
        with engine_of(server.url, concurrency=2) as engine:
            for number in range(5):
                engine.add(sequence(f"r{number}"))
            while len(server.calls) < 2:
                engine.step()
    assert threading.active_count() <= before + 2  # calls of the server's that end just now
