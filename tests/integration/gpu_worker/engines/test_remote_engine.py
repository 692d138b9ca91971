"""The remote engine against servers that fail in every way they can, on real sockets."""

import threading
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.remote.engine import ApiKeyMissing, RemoteEngine
from streams.messages import Grammar
from tests.support.ports import free_port
from tests.support.remote_engine import (
    engine_and_server,
    joined_text,
    make_sequence,
    only_error,
    open_engine,
    run_to_end,
)
from tests.support.stub_upstream import (
    ANSWER,
    FULL_TEXT,
    PROMPT,
    BarrierResponder,
    Responder,
    UpstreamCall,
    break_after,
    bytes_tokenizer,
    close_silently,
    hang,
    hang_in_stream,
    respond_status,
    running_upstream,
    split_words,
    stream_answer,
)


def test_a_stream_becomes_outputs() -> None:
    """Text in order, a token for each event, the reason, and the server's own count."""
    with engine_and_server(stream_answer) as (engine, server):
        outputs = run_to_end(engine, make_sequence())["r"]
    assert joined_text(outputs) == ANSWER
    assert sum(len(output.tokens) for output in outputs) == len(split_words(ANSWER))
    assert outputs[-1].finish == "stop"
    assert outputs[-1].usage
    assert outputs[-1].usage.completion_tokens == len(split_words(ANSWER))
    assert server.calls[0].path == "/completions"


def test_how_to_sample_is_forwarded() -> None:
    """And nothing that was not asked for: strict servers refuse fields that they do not know."""
    grammar = Grammar("json_schema", '{"type": "object"}')
    with engine_and_server(stream_answer) as (engine, server):
        full: dict[str, Any] = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "stop": ["\0"],
            "logprobs": 2,
        }
        run_to_end(engine, make_sequence("full", **full, seed=5, ignore_eos=True, grammar=grammar))
        run_to_end(engine, make_sequence("plain"))
    body, plain = (call.body for call in server.calls)
    assert {name: body[name] for name in full} == full
    assert (body["seed"], body["ignore_eos"], body["max_tokens"]) == (5, True, 100)
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert plain.keys() == body.keys() - {
        "top_k", "stop", "logprobs", "ignore_eos", "response_format",
    }  # fmt: skip


def test_a_request_without_a_seed_has_the_same_one_at_every_attempt() -> None:
    """A retry, or another worker, asks the server for the same draw."""
    with engine_and_server(respond_status(503), stream_answer) as (engine, server):
        run_to_end(engine, make_sequence())
    first, second = (call.body["seed"] for call in server.calls)
    assert first == second


@pytest.mark.parametrize("code", [408, 425, 429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_tried_again(code: int) -> None:
    """The client learns nothing of it."""
    with engine_and_server(respond_status(code), respond_status(code), stream_answer) as (
        engine,
        server,
    ):
        outputs = run_to_end(engine, make_sequence())["r"]
    assert joined_text(outputs) == ANSWER
    assert len(server.calls) == 3


@pytest.mark.parametrize("end", [UpstreamCall.reset, close_silently], ids=["reset", "closed"])
def test_a_connection_that_breaks_before_the_first_token_is_tried_again(end: Responder) -> None:
    """Nothing was seen of the answer, so it can be begun anew."""
    with engine_and_server(end, break_after(0, end), stream_answer) as (engine, _):
        assert joined_text(run_to_end(engine, make_sequence())["r"]) == ANSWER


@pytest.mark.parametrize(
    "end", [UpstreamCall.reset, close_silently, hang_in_stream], ids=lambda end: end.__name__
)
def test_a_stream_that_breaks_goes_on_where_it_was(end: Responder) -> None:
    """Behind exactly what was emitted, with what is left of max_tokens: no gap and no repeat."""
    acts = [break_after(3, end), break_after(2, end), stream_answer]
    with engine_and_server(*acts, chunk_seconds=0.3) as (engine, server):
        outputs = run_to_end(engine, make_sequence(max_tokens=10))["r"]
    said = split_words(ANSWER)
    assert joined_text(outputs) == "".join(said[:10])
    assert outputs[-1].finish == "length"
    assert [call.body["max_tokens"] for call in server.calls] == [10, 7, 5]
    assert server.calls[2].body["prompt"] == PROMPT + "".join(said[:5])
    assert outputs[-1].usage
    assert outputs[-1].usage.completion_tokens == 10
    assert outputs[-1].usage.prompt_tokens == len(split_words(PROMPT))


def test_another_attempt_goes_on_behind_what_was_stored() -> None:
    """A worker that died has left its tokens and their text in the log."""
    said = split_words(ANSWER)
    begun = make_sequence(max_tokens=10)
    stored = Sequence("r", begun.prompt, begun.sampling, [0] * 4, "".join(said[:4]))
    with engine_and_server(stream_answer) as (engine, server):
        outputs = run_to_end(engine, stored)["r"]
    assert joined_text(outputs) == "".join(said[4:10])
    assert server.calls[0].body["max_tokens"] == 6


def test_stop_strings_hold_across_a_break() -> None:
    """The server that goes on has not seen the beginning of one."""
    acts = [break_after(3), stream_answer]  # the / mill / by
    with engine_and_server(*acts) as (engine, _):
        outputs = run_to_end(engine, make_sequence(stop=["by the stream"]))["r"]
    assert joined_text(outputs) == "the mill "
    assert (outputs[-1].finish, outputs[-1].matched_stop) == ("stop", "by the stream")


@pytest.mark.parametrize(
    "told", [{"stop_reason": "by"}, {"matched_stop": "by"}, {"stop_reason": 2}]
)
def test_the_stop_string_that_a_server_found_is_the_one_it_names(told: dict[str, Any]) -> None:
    """It cuts the text itself; vLLM and SGLang say which one it was, or which token."""

    def act(call: UpstreamCall) -> None:
        call.send_head(kind="text/event-stream")
        call.send_text("the mill ")
        call.send_text("", "stop", **told)

    with engine_and_server(act) as (engine, _):
        outputs = run_to_end(engine, make_sequence(stop=["by", "corn"]))["r"]
    assert outputs[-1].matched_stop == ("" if told.get("stop_reason") == 2 else "by")


def garbage(call: UpstreamCall) -> None:
    call.send_head(kind="text/event-stream")
    call.send_event("{no json")


def html(call: UpstreamCall) -> None:
    call.send_head(kind="text/html")
    call.wfile.write(b"<html>welcome</html>")


def no_http(call: UpstreamCall) -> None:
    call.wfile.write(b"SSH-2.0-corn\r\n\r\n")


def its_own_error(call: UpstreamCall) -> None:
    break_after(2, lambda c: c.send_event({"error": {"message": "out of memory", "code": 500}}))(
        call
    )


@pytest.mark.parametrize("act", [garbage, html, no_http, its_own_error])
def test_nonsense_is_tried_again(act: Responder) -> None:
    """A proxy that starts, a server that falls: the next call may be better."""
    with engine_and_server(act, stream_answer) as (engine, _):
        assert joined_text(run_to_end(engine, make_sequence())["r"]) == ANSWER


@pytest.mark.parametrize(
    "act", [garbage, html, no_http, respond_status(500), UpstreamCall.reset, hang]
)
def test_a_request_that_may_be_the_cause_is_not_tried_for_ever(act: Responder) -> None:
    """One that crashes the server must not keep it down."""
    with engine_and_server(act, first_seconds=0.2) as (engine, server):
        code, _ = only_error(run_to_end(engine, make_sequence())["r"])
    assert code == "upstream_failed"
    assert len(server.calls) == 4


def test_a_refusal_is_the_requests_own_and_never_tried_again() -> None:
    """The client gets the server's reason, and others are unharmed."""
    refusal = respond_status(400, {"error": {"message": "max_tokens is too large"}})
    with engine_and_server(refusal, stream_answer) as (engine, server):
        code, message = only_error(run_to_end(engine, make_sequence("bad"))["bad"])
        assert joined_text(run_to_end(engine, make_sequence("good"))["good"]) == ANSWER
    assert (code, len(server.calls)) == ("upstream_refused", 2)
    assert "max_tokens is too large" in message


def test_what_has_no_field_in_the_api_fails_without_a_call() -> None:
    """A constraint that is left out in silence would be a wrong answer."""
    with engine_and_server(stream_answer) as (engine, server):
        code, _ = only_error(run_to_end(engine, make_sequence(grammar=Grammar("regex", "a+")))["r"])
    assert (code, server.calls) == ("unsupported_value", [])


def test_a_wrong_key_is_no_fault_of_the_client() -> None:
    """It cannot change the request so that it would pass."""
    with engine_and_server(respond_status(401, {"error": "bad key"})) as (engine, _):
        code, _ = only_error(run_to_end(engine, make_sequence())["r"])
    assert code == "upstream_failed"


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry, which everybody may read, has only the variable's name."""
    monkeypatch.setenv("CORN_KEY", "sk-corn")
    with engine_and_server(stream_answer, api_key_variable="CORN_KEY") as (engine, server):
        run_to_end(engine, make_sequence())
    assert server.calls[0].headers["authorization"] == "Bearer sk-corn"
    monkeypatch.delenv("CORN_KEY")
    with pytest.raises(ApiKeyMissing, match="CORN_KEY"):
        RemoteEngine.load(None, url="x", model="m", context_length=1, api_key_variable="CORN_KEY")


def test_no_more_calls_at_once_than_the_limit() -> None:
    """The others wait in the engine for a moment, beyond it they are never pulled."""
    crowd = BarrierResponder(stream_answer, 3)
    with engine_and_server(crowd, concurrency=3) as (engine, _):
        assert (engine.free_capacity().sequences, engine.concurrency_limit()) == (3, 3)
        requests = [make_sequence(f"r{n}") for n in range(20)]
        outputs = run_to_end(engine, *requests)
    assert {joined_text(each) for each in outputs.values()} == {ANSWER}
    assert crowd.max_concurrent == 3


def test_a_cancelled_request_hangs_up() -> None:
    """The server need not go on for nobody, and its place is free."""
    with engine_and_server(break_after(1, hang_in_stream), stream_answer, concurrency=1) as (
        engine,
        server,
    ):
        engine.add(make_sequence())
        while not engine.step():
            pass
        engine.cancel("r")
        engine.cancel("r")
        (output,) = engine.step()
        assert output.finish == "cancelled"
        assert engine.idle
        assert server.client_left.wait(10)
        assert joined_text(run_to_end(engine, make_sequence())["r"]) == ANSWER


def test_while_the_server_is_away_nothing_is_announced_and_nothing_fails() -> None:
    """What is held waits; when the server comes back it is served."""
    port = free_port()
    with open_engine(f"http://127.0.0.1:{port}", cooldown_seconds=0.05) as engine:
        requests = [make_sequence(f"r{n}") for n in range(8)]
        for each in requests:
            engine.add(each)
        while engine.concurrency_limit() > 0:
            assert engine.step() == []
        outputs: list[Output] = []
        with running_upstream(stream_answer, port=port):
            while not engine.idle:
                outputs += engine.step()
    assert sorted(o.request_id for o in outputs if o.finish == "stop") == [
        each.request_id for each in requests
    ]
    assert {joined_text([o for o in outputs if o.request_id == f"r{n}"]) for n in range(8)} == {
        ANSWER
    }


def test_a_retry_after_lowers_the_credit() -> None:
    """The server has asked not to be asked: the work is not for this worker now."""
    with engine_and_server(respond_status(429, retry_after="300")) as (engine, server):
        engine.add(make_sequence())
        while engine.concurrency_limit():
            engine.step()
        assert len(server.calls) == 1
        engine.cancel("r")


def token_ids(call: UpstreamCall) -> None:
    """As vLLM: each event tells its tokens' ids; here the answer's bytes, two at a time."""
    prompt: list[int] = call.body["prompt"]
    rest = list(FULL_TEXT.encode())[len(prompt) :][: call.body["max_tokens"]]
    assert bytes(prompt).decode() == FULL_TEXT[: len(prompt)]
    call.send_head(kind="text/event-stream")
    pairs = [rest[at : at + 2] for at in range(0, len(rest), 2)]
    for pair in pairs[:3] if len(call.server.calls) < 3 else pairs:
        call.send_text(bytes(pair).decode(), token_ids=pair)
    if len(call.server.calls) >= 3:
        call.send_text("", "length", token_ids=[])


def test_token_ids_are_kept_where_the_server_tells_them(tmp_path: Path) -> None:
    """As from an engine of our own: text is made of them, and a break continues behind them."""
    bytes_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with running_upstream(token_ids) as server:
        engine = RemoteEngine.load(
            tmp_path, url=server.url, api="vllm", model="corn", context_length=99, retry_seconds=0.0
        )
        outputs = run_to_end(engine, make_sequence(max_tokens=20, stop=["ground"]))["r"]
        engine.close()
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == list(ANSWER.encode())[:20]
    assert joined_text(outputs) == ANSWER[:20]
    assert [len(call.body["prompt"]) for call in server.calls] == [5, 11, 17]
    assert server.calls[0].body["return_token_ids"]


def test_closing_ends_every_thread() -> None:
    """Also with calls under way, and with some that wait to be made again."""
    before = threading.active_count()
    with running_upstream(hang) as server:
        with open_engine(server.url, concurrency=2) as engine:
            for number in range(5):
                engine.add(make_sequence(f"r{number}"))
            while len(server.calls) < 2:
                engine.step()
    assert threading.active_count() <= before + 2  # calls of the server's that end just now
