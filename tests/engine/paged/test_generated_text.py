"""Text, stop strings, ends and log probabilities of the transformers engine."""

import math
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from streams.messages import Sampling
from tests.engine.tiny_models import (
    END,
    engine,
    expected,
    greedy_sequence,
    load_tiny_model,
    prompt,
    reference,
    run_to_end,
    tokenizer,
)

COUNT = 24
IDS = prompt(3, 30)


def _text(tokens: list[int]) -> str:
    text: str = tokenizer().decode(tokens)
    return text


def _stopping(stop: list[str], generated: list[int] | None = None) -> Sequence:
    sampling = Sampling(max_tokens=COUNT, temperature=0, stop=stop)
    return Sequence("a", IDS, sampling, generated or [])


def test_text_is_that_of_the_tokens() -> None:
    """Pieces put together are the whole, whatever was held back in between."""
    results = run_to_end(engine(), [greedy_sequence("a", IDS, COUNT)])
    assert results.text["a"] == _text(expected("llama", IDS, COUNT))


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_text_for_those_that_want_them(skip: bool) -> None:
    """Models whose call marks are special tokens call no tools otherwise."""
    tokens = expected("llama", IDS, COUNT)
    marks = Tokenizer.from_str(tokenizer().to_str())
    marks.add_special_tokens([marks.id_to_token(tokens[5])])
    made = TransformersEngine(replace(load_tiny_model("llama"), tokenizer=marks), 8, 512, 2048)
    sampling = Sampling(max_tokens=COUNT, temperature=0, skip_special_tokens=skip)
    results = run_to_end(made, [Sequence("a", IDS, sampling)])
    assert results.text["a"] == marks.decode(tokens, skip_special_tokens=skip)
    assert (results.text["a"] == _text(tokens)) != skip


def test_a_stop_string_ends_a_sequence_and_stays_out_of_its_text() -> None:
    """As OpenAI's API has it."""
    whole = _text(expected("llama", IDS, COUNT))
    stop = whole[9:12]
    results = run_to_end(engine(), [_stopping(["nowhere", stop])])
    end = results.terminals["a"]
    assert (end.finish, end.matched_stop) == ("stop", stop)
    assert results.text["a"] == whole[: whole.index(stop)]


def test_a_resumed_text_continues_where_the_stored_one_ended() -> None:
    """What an earlier attempt held back comes from the later one, once."""
    whole = expected("llama", IDS, COUNT)
    stop = _text(whole)[9:14]
    uninterrupted = run_to_end(engine(), [_stopping([stop])])
    made = engine()
    for cut in range(1, len(uninterrupted.tokens["a"])):
        before = engine()
        outputs: list[Output] = []
        before.add(_stopping([stop]))
        while sum(len(o.tokens) for o in outputs) < cut:
            outputs += before.step()
        stored = "".join(o.text for o in outputs)
        resumed = run_to_end(made, [_stopping([stop], whole[:cut])])
        assert stored + resumed.text["a"] == uninterrupted.text["a"]
        assert resumed.terminals["a"].matched_stop == stop


def test_what_was_complete_already_comes_back_finished() -> None:
    """A worker may die between the last tokens and the terminal."""
    whole = expected("llama", IDS, COUNT)
    stop = _text(whole)[4:6]
    sampling = Sampling(max_tokens=COUNT, temperature=0)
    cases = {
        "length": Sequence("length", IDS, sampling, whole),
        "end": Sequence("end", IDS, sampling, [*whole[:3], END]),
        "string": Sequence("string", IDS, Sampling(COUNT, stop=[stop]), whole[:12]),
    }
    results = run_to_end(engine(), list(cases.values()))
    assert {name: out.finish for name, out in results.terminals.items()} == {
        "length": "length",
        "end": "stop",
        "string": "stop",
    }
    assert all(not tokens for tokens in results.tokens.values())


def test_the_end_token_stops_unless_it_is_ignored() -> None:
    """It counts as a token and has no text."""
    whole = expected("llama", IDS, COUNT)
    cut = whole.index(whole[9])
    made = TransformersEngine(replace(load_tiny_model("llama"), eos_ids=frozenset({whole[9]})))
    stopped = run_to_end(made, [greedy_sequence("a", IDS, COUNT)])
    assert stopped.terminals["a"].finish == "stop"
    assert stopped.tokens["a"] == whole[: cut + 1]
    assert stopped.text["a"] == _text(whole[:cut])
    ignoring = Sampling(max_tokens=COUNT, temperature=0, ignore_eos=True)
    going_on = run_to_end(made, [Sequence("b", IDS, ignoring)])
    assert going_on.terminals["b"].finish == "length"
    assert going_on.tokens["b"] == whole


def test_stop_tokens_end_the_answer_and_min_tokens_keeps_both_ends_away() -> None:
    """The end token and the stop tokens are not even sampled before `min_tokens`."""
    whole = expected("llama", IDS, COUNT)
    made = TransformersEngine(replace(load_tiny_model("llama"), eos_ids=frozenset({whole[9]})))
    cut = whole.index(whole[4])
    stopping = Sampling(max_tokens=COUNT, temperature=0, stop_token_ids=[whole[4]])
    stopped = run_to_end(made, [Sequence("a", IDS, stopping)])
    assert stopped.terminals["a"].finish == "stop"
    assert stopped.tokens["a"] == whole[: cut + 1]
    assert stopped.text["a"] == _text(whole[:cut])
    longer = run_to_end(made, [Sequence("b", IDS, replace(stopping, min_tokens=12))])
    assert len(longer.tokens["b"]) >= 12
    assert {whole[4], whole[9]}.isdisjoint(longer.tokens["b"][:12])


def test_logprobs_are_the_models_own() -> None:
    """Before temperature and cuts, with the likeliest in order."""
    sampling = Sampling(max_tokens=6, temperature=0.7, top_k=3, seed=1, logprobs=4)
    made = engine()
    made.add(Sequence("a", IDS, sampling))
    ids = list(IDS)
    while not made.idle:
        for output in made.step():
            (found,) = output.logprobs or []
            with torch.inference_mode():
                logits = reference("llama")(torch.tensor([ids])).logits[0, -1]
            want = logits.log_softmax(-1)
            assert found.token == output.tokens[0]
            assert math.isclose(found.logprob, float(want[found.token]), abs_tol=1e-4)
            assert [token for token, _, _ in found.top] == want.topk(4).indices.tolist()
            ids += output.tokens
