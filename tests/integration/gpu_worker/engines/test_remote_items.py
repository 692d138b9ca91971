"""The remote engine against APIs that answer whole: one input per call, or embeddings."""

import struct
import threading
import time
from collections import Counter
from random import Random
from typing import Any

import pytest
from prometheus_client import REGISTRY

from streams.messages import Grammar
from tests.support.remote_engine import (
    engine_and_server,
    joined_text,
    make_inputs,
    make_sequence,
    only_error,
    run_to_end,
)
from tests.support.stub_upstream import (
    PROMPT,
    BarrierResponder,
    UpstreamCall,
    respond_json,
    respond_status,
)


def generated(body: Any) -> object:
    return [{"generated_text": body["inputs"].upper() + "END more"}]


def test_a_single_item_api_generates() -> None:
    """A whole text at once, cut at its stop string, which such APIs leave in."""
    with engine_and_server(respond_status(503), respond_json(generated), api="single") as (
        engine,
        server,
    ):
        outputs = run_to_end(engine, make_sequence(temperature=0, stop=["END"], max_tokens=9))["r"]
    assert (joined_text(outputs), outputs[-1].finish) == (PROMPT.upper(), "stop")
    assert outputs[-1].matched_stop == "END"
    parameters = server.calls[1].body["parameters"]
    assert (parameters["max_new_tokens"], parameters["do_sample"]) == (9, False)
    assert parameters["stop"] == ["END"]


@pytest.mark.parametrize(
    "asked",
    [
        {"grammar": Grammar("json_object")},
        {"logprobs": 0},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": [(1, 2.0)]},
        {"ignore_eos": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_has_no_field_in_the_api_fails_without_a_call(asked: dict[str, Any]) -> None:
    """A wish that is left out in silence would be a wrong answer."""
    with engine_and_server(respond_json(generated), api="single") as (engine, server):
        code, message = only_error(run_to_end(engine, make_sequence(**asked))["r"])
    assert (code, server.calls) == ("unsupported_value", [])
    assert next(iter(asked)) in message


def test_a_repetition_penalty_reaches_a_single_item_api() -> None:
    """It has a field of its own there."""
    with engine_and_server(respond_json(generated), api="single") as (engine, server):
        run_to_end(engine, make_sequence(repetition_penalty=1.2))
    assert server.calls[0].body["parameters"]["repetition_penalty"] == 1.2


def row(body: Any) -> object:
    return [float(len(body["inputs"])), 2.0, 2.0]


def test_a_single_item_api_embeds_each_input_in_order() -> None:
    """One call each, as many at once as are allowed."""
    texts = ["x" * (n + 1) for n in range(30)]
    crowd = BarrierResponder(respond_json(row), 4)
    with engine_and_server(crowd, api="single", concurrency=4) as (engine, server):
        (output,) = run_to_end(engine, make_inputs(*texts))["r"]
    assert output.vectors
    assert [struct.unpack("<3f", vector)[0] for vector in output.vectors] == [*range(1, 31)]
    assert len(server.calls) == 30
    assert crowd.max_concurrent == 4


def picky(call: UpstreamCall) -> None:
    refused = "bad" in call.body["inputs"]
    (
        respond_status(422, {"error": "bad input"})
        if refused
        else respond_json(lambda body: [row(body)])
    )(call)


def test_a_failed_input_fails_its_own_request_only() -> None:
    """Its other inputs are not asked for any more; the neighbours do not notice."""
    with engine_and_server(picky, api="single", concurrency=2) as (engine, _):
        good, bad = (
            make_inputs("a", "b", name="good"),
            make_inputs("a", "bad", *"cdefgh", name="bad"),
        )
        outputs = run_to_end(engine, bad, good)
    assert only_error(outputs["bad"])[0] == "upstream_refused"
    assert outputs["good"][0].vectors
    assert len(outputs["good"][0].vectors) == 2


def test_vectors_are_cut_to_the_dimensions_that_were_asked_for() -> None:
    """And are of length one again."""
    with engine_and_server(respond_json(lambda _: [3.0, 4.0, 9.0]), api="single") as (engine, _):
        (output,) = run_to_end(engine, make_inputs("a", dimensions=2))["r"]
        assert (
            only_error(run_to_end(engine, make_inputs("a", dimensions=4))["r"])[0]
            == "unsupported_value"
        )
    assert output.vectors
    assert struct.unpack("<2f", output.vectors[0]) == pytest.approx((0.6, 0.8))


@pytest.mark.parametrize("answer", [{}, [], [[1.0], [2.0]], ["x"], [None]])
def test_an_answer_without_a_vector_is_an_error(answer: object) -> None:
    """Never a vector that somebody made up."""
    with engine_and_server(respond_json(lambda _: answer), api="single") as (engine, _):
        assert only_error(run_to_end(engine, make_inputs("a"))["r"])[0] == "upstream_failed"


def embeddings(body: Any) -> object:
    rows = [{"index": i, "embedding": [float(i), 1.0]} for i in range(len(body["input"]))]
    return {"data": rows[::-1]}


def test_an_openai_server_embeds_all_inputs_by_one_call() -> None:
    """In the order of their indices."""
    with engine_and_server(respond_json(embeddings)) as (engine, server):
        (output,) = run_to_end(engine, make_inputs("a", "b", "c"))["r"]
    assert output.vectors
    assert [struct.unpack("<2f", vector)[0] for vector in output.vectors] == [0, 1, 2]
    assert server.calls[0].body["input"] == ["a", "b", "c"]
    assert server.calls[0].path == "/embeddings"


class BusyApi:
    """An act of an API that answers after various times, and refuses every twentieth call.

    It embeds a text as its number, and counts how often it has answered for each.
    """

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self._draw, self._counting = Random(1), threading.Lock()
        self._calls = 0

    def __call__(self, call: UpstreamCall) -> None:
        text = call.body["inputs"]
        with self._counting:
            self._calls += 1
            is_refused = self._calls % 20 == 0
            self.answered[text] += not is_refused
            seconds = 0.01 * self._draw.random()
        if is_refused:
            respond_status(429, {"error": "too many"})(call)
            return
        time.sleep(seconds)  # what the API is there for takes its time
        respond_json(lambda body: [float(body["inputs"]), 1.0])(call)


def test_items_of_a_busy_api_are_answered_once_each_and_in_order() -> None:
    """Several requests at once, in groups, with 5 % of the calls refused and made again."""
    api = BusyApi()
    numbers = [range(first, first + 40) for first in range(1, 401, 40)]
    requests = [make_inputs(*map(str, each), name=f"r{each.start}") for each in numbers]
    with engine_and_server(
        api, api="single", concurrency=8, group_items=100, group_seconds=0.02
    ) as (engine, server):
        outputs = run_to_end(engine, *requests)
    for each in numbers:
        (output,) = outputs[f"r{each.start}"]
        assert output.vectors
        assert [struct.unpack("<2f", vector)[0] for vector in output.vectors] == [*each]
    assert set(api.answered.values()) == {1}
    assert len(api.answered) == 400
    assert len(server.calls) <= 400 * 1.02 / 0.95


def count_groups() -> tuple[float, float]:
    """Groups of calls that have begun, and the requests in them."""
    labels = {"upstream": "corn"}
    groups = REGISTRY.get_sample_value("millstream_remote_groups_total", labels)
    requests = REGISTRY.get_sample_value("millstream_remote_group_requests_total", labels)
    return groups or 0.0, requests or 0.0


def test_calls_begin_by_groups() -> None:
    """A full one at once, whatever its window; one that is not when its window is over."""
    groups, requests = count_groups()
    four = [make_sequence(f"r{number}") for number in range(4)]
    options = {"api": "single", "concurrency": 4, "group_items": 4}
    with engine_and_server(respond_json(generated), **options, group_seconds=3600) as (engine, _):
        assert engine.free_capacity().sequences == engine.concurrency_limit() == 7
        run_to_end(engine, *four)
    assert count_groups() == (groups + 1, requests + 4)
    with engine_and_server(respond_json(generated), **options, group_seconds=0.01) as (engine, _):
        run_to_end(engine, four[0])
    assert count_groups() == (groups + 2, requests + 5)


def test_a_request_that_waits_for_its_group_can_be_cancelled() -> None:
    """It leaves the group; no call was made for it."""
    options = {"api": "single", "group_items": 2, "group_seconds": 3600}
    with engine_and_server(respond_json(generated), **options) as (engine, server):
        engine.add(make_sequence("left"))
        engine.cancel("left")
        (output,) = engine.step()
        run_to_end(engine, make_sequence("a"), make_sequence("b"))
    assert (output.request_id, output.finish) == ("left", "cancelled")
    assert len(server.calls) == 2
