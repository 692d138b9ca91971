"""Answers of a remote model that break anywhere: whole and exact in the end, or a clear error."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from gpu_worker.engines.engine import Output
from gpu_worker.engines.remote.engine import RemoteEngine
from gpu_worker.engines.remote.output_decoder import extend_sequence
from streams.messages import Grammar
from tests.support.remote_engine import (
    joined_text,
    make_sequence,
    only_error,
    run_to_end,
)
from tests.support.stub_upstream import PROMPT, StubUpstream, running_upstream
from tests.support.tiny_model_server import LENGTH, TinyModelServer, pieces_tokenizer

SCHEMA = Grammar("json_schema", '{"type": "object"}')
REGEX = Grammar("regex", r"\{.*\}")
GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 0, "max_tokens": 100}
DEPENDENT: dict[str, dict[str, Any]] = {
    "json": {**GREEDY, "grammar": SCHEMA},
    "json-sampled": {**GREEDY, "grammar": SCHEMA, "temperature": 1.0},
    "json-cut": {**GREEDY, "grammar": SCHEMA, "max_tokens": 5},
    "json-stop": {**GREEDY, "grammar": SCHEMA, "stop": [', "st']},
    "presence": {**GREEDY, "presence_penalty": 0.4},
    "frequency": {**GREEDY, "frequency_penalty": 0.5},
    "repetition": {**GREEDY, "repetition_penalty": 1.5},
    "sampled": {**GREEDY, "temperature": 1.0, "seed": 3, "presence_penalty": 0.4},
    "seeded": {**GREEDY, "temperature": 1.0, "seed": 3},
}


@dataclass(frozen=True)
class Door:
    """One way to the server: its API, and whether its tokeniser is here."""

    api: str
    has_tokenizer: bool
    directory: Path

    @contextmanager
    def open(self, server: TinyModelServer) -> Iterator[tuple[RemoteEngine, StubUpstream]]:
        with running_upstream(server) as upstream:
            directory = self.directory if self.has_tokenizer else None
            wanted = {"model": "corn", "context_length": 1000, "api": self.api}
            engine = RemoteEngine.load(
                directory,
                url=upstream.url,
                retry_seconds=0.0,
                **wanted,  # type: ignore[arg-type]
            )
            try:
                yield engine, upstream
            finally:
                engine.close()


@pytest.fixture(params=["vllm", "openai-tokenizer", "openai"])
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Door:
    """Tokens known; the text alone, with the prompt as tokens; texts alone."""
    pieces_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return Door(request.param.split("-")[0], request.param != "openai", tmp_path)


@dataclass(frozen=True)
class Answer:
    """An answer as a client gets it, however many calls it took."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    usage: object


def answer_of(outputs: list[Output]) -> Answer:
    assert not any(output.error for output in outputs), outputs[-1].error
    return Answer(
        joined_text(outputs),
        [token for output in outputs for token in output.tokens],
        [each.logprob for output in outputs for each in output.logprobs or ()],
        outputs[-1].finish,
        outputs[-1].usage,
    )


def ask(engine: RemoteEngine, sampling: dict[str, Any]) -> Answer:
    return answer_of(run_to_end(engine, make_sequence(**sampling))["r"])


def with_grammar_of(door: Door, sampling: dict[str, Any]) -> dict[str, Any]:
    """The same with a regular expression, where the API has a field for one."""
    return (
        {**sampling, "grammar": REGEX} if door.api == "vllm" and "grammar" in sampling else sampling
    )


def from_start(upstream: StubUpstream) -> list[bool]:
    """Of each call, whether it asks for the answer from its start."""
    return [len(call.body["prompt"]) == len(PROMPT) for call in upstream.calls]


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_stream_that_breaks_anywhere_ends_as_if_it_had_not(door: Door, name: str) -> None:
    """At every position, twice: text, tokens, log probabilities, reason and usage."""
    sampling = with_grammar_of(door, DEPENDENT[name])
    server = TinyModelServer(counts_prompt=door.api == "vllm")
    with door.open(server) as (engine, _):
        whole = ask(engine, sampling)
        for position in range(len(whole.logprobs) + 1):
            server.breaks.extend([position, position + 1])
            answer = ask(engine, sampling)
            if position + 1 >= sampling["max_tokens"]:  # all had come: no call was made to count it
                answer = replace(answer, usage=whole.usage)
            assert answer == whole
            server.breaks.clear()


@pytest.mark.parametrize("name", DEPENDENT)
def test_another_worker_ends_it_as_if_none_had_died(door: Door, name: str) -> None:
    """Behind everything that may be stored, which is not emitted again."""
    sampling = with_grammar_of(door, DEPENDENT[name])
    stored = make_sequence(**sampling)
    with door.open(TinyModelServer(counts_prompt=door.api == "vllm")) as (engine, _):
        outputs = run_to_end(engine, stored)["r"]
        whole = answer_of(outputs)
        for output in outputs:
            stored = extend_sequence(stored, output)
            rest = answer_of(run_to_end(engine, stored)["r"])
            assert stored.text + rest.text == whole.text
            assert stored.generated + rest.tokens == whole.tokens
            assert rest.finish == whole.finish


def test_a_document_is_not_begun_again_behind_half_of_it(door: Door) -> None:
    """The grammar begins anew in each call, so each call asks for all of it."""
    sampling = with_grammar_of(door, DEPENDENT["json"])
    with door.open(TinyModelServer([3, 5, 6])) as (engine, upstream):
        answer = ask(engine, sampling)
    assert set(json.loads(answer.text)) == {"wheels", "stones"}
    assert from_start(upstream) == [True] * 4
    assert {call.body["max_tokens"] for call in upstream.calls} == {100}
    assert len({call.body["seed"] for call in upstream.calls}) == 1


def test_vllm_goes_on_under_a_repetition_penalty(door: Door) -> None:
    """There it counts the prompt's tokens like the output's; elsewhere that is not known."""
    server = TinyModelServer([3], counts_prompt=door.api == "vllm")
    with door.open(server) as (engine, upstream):
        run_to_end(engine, make_sequence(**DEPENDENT["repetition"]))
    assert from_start(upstream) == [True, door.api != "vllm"]


def test_what_is_left_of_the_limits_is_asked_for_when_it_goes_on(door: Door) -> None:
    """Of min_tokens as of max_tokens; and random numbers that were not drawn before."""
    with door.open(TinyModelServer([2, 2])) as (engine, upstream):
        run_to_end(engine, make_sequence(min_tokens=3, temperature=1.0))
    bodies = [call.body for call in upstream.calls]
    assert from_start(upstream) == [True, False, False]
    assert [body["max_tokens"] for body in bodies] == [100, 98, 96]
    assert [body.get("min_tokens", 0) for body in bodies] == [3, 1, 0]
    assert len({body["seed"] for body in bodies}) == 3


def test_another_document_of_a_replay_is_an_error_and_no_part_of_the_answer(door: Door) -> None:
    """A server that draws other numbers: what it says behind the break would not fit."""
    server = TinyModelServer([6], ignores_seed=True)
    sampling = with_grammar_of(door, DEPENDENT["json-sampled"])
    with door.open(server) as (engine, upstream):
        outputs = run_to_end(engine, make_sequence(**sampling))["r"]
    code, message = only_error(outputs)
    assert code == "upstream_failed"
    assert "cannot be continued exactly" in message
    assert "grammar" in message
    assert joined_text(outputs) == '{"wheels": 12, "stones": 12'
    assert from_start(upstream) == [True, True]


def test_a_seeded_text_goes_on_where_the_server_cannot_repeat_it(door: Door) -> None:
    """Any text is a right one there: no grammar and no penalty ties its end to its beginning."""
    sampling = {**DEPENDENT["seeded"], "logprobs": None}
    with door.open(TinyModelServer([6], ignores_seed=True)) as (engine, upstream):
        answer = ask(engine, sampling)
    assert from_start(upstream) == [True, True, False]
    assert len(answer.text.split()) == LENGTH


def test_a_replay_that_always_breaks_in_the_same_place_is_not_tried_for_ever(door: Door) -> None:
    """It brings nothing, as often as it is made."""
    sampling = with_grammar_of(door, DEPENDENT["json"])
    with door.open(TinyModelServer([3] * 100)) as (engine, upstream):
        code, _ = only_error(run_to_end(engine, make_sequence(**sampling))["r"])
    assert (code, len(upstream.calls)) == ("upstream_failed", 4)


@pytest.mark.parametrize("groups", [(1, 3), (3, 1), (2, 5), (1, 100)])
def test_a_replay_may_come_in_other_pieces(door: Door, groups: tuple[int, int]) -> None:
    """A busy server puts several tokens into one event."""
    sampling = with_grammar_of(door, DEPENDENT["json"])
    server = TinyModelServer()
    with door.open(server) as (engine, _):
        whole = ask(engine, sampling)
        server.breaks.append(4)
        server.groups.extend(groups)
        assert ask(engine, sampling) == whole


def test_text_that_cannot_be_encoded_is_asked_for_again(tmp_path: Path) -> None:
    """Behind other tokens the model would say something else."""
    made = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    made.save(str(tmp_path / "tokenizer.json"))
    server = TinyModelServer()
    with Door("openai", True, tmp_path).open(server) as (engine, upstream):
        whole = ask(engine, GREEDY)
        server.breaks.append(4)
        assert ask(engine, GREEDY) == whole
    assert from_start(upstream) == [True] * 3


def test_a_token_that_stands_for_unknown_ones_ends_no_answer(door: Door) -> None:
    """A server that sends text alone has tokens stored as 0, which may be a client's stop token."""
    sampling = {**GREEDY, "max_tokens": 6, "stop_token_ids": [0], "ignore_eos": True}
    stored = make_sequence(**sampling)
    with door.open(TinyModelServer(counts_prompt=door.api == "vllm")) as (engine, _):
        outputs = run_to_end(engine, stored)["r"]
        whole = answer_of(outputs)
        assert whole.finish == "length"
        for output in outputs[:-1]:
            stored = extend_sequence(stored, output)
            rest = answer_of(run_to_end(engine, stored)["r"])
            assert (stored.text + rest.text, rest.finish) == (whole.text, "length")


def test_vllm_is_told_what_is_off(door: Door) -> None:
    """Its own defaults for the model would change the answer; OpenAI's API has no such fields."""
    with door.open(TinyModelServer()) as (engine, upstream):
        ask(engine, {**GREEDY, "max_tokens": 2})
    named = {"top_k", "min_p", "repetition_penalty"} & upstream.calls[0].body.keys()
    values = {name: upstream.calls[0].body[name] for name in named}
    off = {"top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert values == (off if door.api == "vllm" else {})
