"""Answers are resumed by what is stored of them and by the parameters of their requests."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.remote.openai_protocol import OpenAIProtocol, VLLMProtocol
from gpu_worker.engines.remote.stream_resumption import (
    ReplayDiffers,
    ResumeMode,
    StoredPrefix,
    choose_resume_mode,
    find_output_dependent,
    resume_failure,
)
from streams.messages import Grammar, Logprob, Sampling

GRAMMARS = [Grammar("json_object"), Grammar("json_schema", "{}"), Grammar("regex", "a|b")]
DEPENDENT: list[dict[str, Any]] = [
    *({"grammar": grammar} for grammar in GRAMMARS),
    {"presence_penalty": 0.5},
    {"presence_penalty": -0.5},
    {"frequency_penalty": 0.5},
]
INDEPENDENT: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "seed": 7},
    {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "logit_bias": [(1, 2.0)]},
    {"stop": ["x"], "stop_token_ids": [1], "ignore_eos": True, "min_tokens": 3, "logprobs": 2},
]


def mode_of(
    sampling: dict[str, Any], text: str = "said", *, vllm: bool = False, differed: bool = False
) -> ResumeMode:
    chosen = Sampling(**sampling)
    protocol = VLLMProtocol("m") if vllm else OpenAIProtocol("m")
    sequence = Sequence("r", [1], chosen, [0] * len(text), text)
    dependent = find_output_dependent(chosen, protocol.output_dependent)
    return choose_resume_mode(sequence, can_continue=not dependent, replay_differed=differed)


@pytest.mark.parametrize("sampling", [*DEPENDENT, *INDEPENDENT, {"seed": 7}], ids=str)
def test_nothing_stored_is_begun_anew(sampling: dict[str, Any]) -> None:
    """Nobody has seen anything, so any answer is exact."""
    assert mode_of(sampling, "") is ResumeMode.RESTART


@pytest.mark.parametrize("sampling", INDEPENDENT, ids=str)
@pytest.mark.parametrize("differed", [False, True])
def test_what_depends_on_the_tokens_before_alone_is_continued(
    sampling: dict[str, Any], differed: bool
) -> None:
    """The next token is the same whether they are prompt or output."""
    assert mode_of(sampling, differed=differed) is ResumeMode.CONTINUE


@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", DEPENDENT, ids=str)
def test_what_depends_on_the_output_is_replayed_and_fails_if_that_differs(
    sampling: dict[str, Any], temperature: float, vllm: bool
) -> None:
    """Behind a prompt a grammar would begin anew, and penalties would forget."""
    sampled = {**sampling, "temperature": temperature}
    assert mode_of(sampled, vllm=vllm) is ResumeMode.REPLAY
    assert mode_of(sampled, vllm=vllm, differed=True) is ResumeMode.FAIL


def test_a_repetition_penalty_is_continued_where_it_is_known_to_count_the_prompt() -> None:
    """By vLLM's documentation it does; other servers' may not."""
    assert mode_of({"repetition_penalty": 1.2}, vllm=True) is ResumeMode.CONTINUE
    assert mode_of({"repetition_penalty": 1.2}) is ResumeMode.REPLAY


def test_a_seed_of_the_clients_is_replayed_and_continued_if_that_differs() -> None:
    """The client asked for the same answer again; a server that cannot give it still answers."""
    assert mode_of({"seed": 7}) is ResumeMode.REPLAY
    assert mode_of({"seed": 7}, differed=True) is ResumeMode.CONTINUE


def test_text_that_cannot_be_encoded_is_replayed_and_fails_if_that_differs() -> None:
    """Behind other tokens another text would follow."""
    sequence = Sequence("r", [1], Sampling(temperature=0.0), [0], "said")
    for differed, mode in [(False, ResumeMode.REPLAY), (True, ResumeMode.FAIL)]:
        found = choose_resume_mode(sequence, can_continue=False, replay_differed=differed)
        assert found is mode


def test_the_error_names_what_cannot_be_resumed() -> None:
    """And what to do about it."""
    error = resume_failure(["grammar", "presence_penalty"])
    assert error.code == "upstream_failed"
    assert "cannot be continued exactly" in str(error)
    assert "grammar, presence_penalty" in str(error)
    assert "send the request again" in str(error)
    assert "tokenizer" in str(resume_failure([]))


texts = st.text("ab🌊", min_size=1, max_size=12)


def pieces(text: str, cuts: list[int]) -> list[str]:
    """The text in pieces of these lengths, and the rest."""
    found = []
    for length in cuts:
        found.append(text[:length])
        text = text[length:]
    return [piece for piece in [*found, text] if piece]


def output_of(piece: str, count: int) -> Output:
    logprobs = [Logprob(ord(character), character, -1.0) for character in piece[:count]]
    return Output("r", [ord(character) for character in piece[:count]], piece, logprobs)


@given(texts, st.integers(0, 12), st.lists(st.integers(1, 4), max_size=6))
def test_only_what_is_not_stored_comes_out_of_a_replay(
    full: str, length: int, cuts: list[int]
) -> None:
    """Tokens, text and log probabilities, in whatever pieces it comes."""
    stored = full[:length]
    prefix = StoredPrefix([ord(character) for character in stored], stored, True)
    outputs = [prefix.drop(output_of(piece, len(piece))) for piece in pieces(full, cuts)]
    rest = full[length:]
    assert "".join(output.text for output in outputs) == rest
    assert [token for output in outputs for token in output.tokens] == [*map(ord, rest)]
    assert [p.text for output in outputs for p in output.logprobs or ()] == [*rest]
    assert prefix.is_complete


@given(texts, st.integers(1, 12), st.lists(st.integers(1, 4), max_size=6))
def test_text_alone_is_compared_where_no_tokens_are_known(
    full: str, length: int, cuts: list[int]
) -> None:
    """A replay may come in fewer pieces than were stored, each of which counts as a token."""
    stored = full[:length]
    prefix = StoredPrefix([0] * len(stored), stored, False)
    outputs = [prefix.drop(Output("r", [0], piece)) for piece in pieces(full, cuts)]
    assert "".join(output.text for output in outputs) == full[length:]
    assert prefix.is_complete


@given(texts, texts)
def test_another_text_is_noticed_before_anything_of_it_comes_out(stored: str, other: str) -> None:
    """Character by character: the first that differs ends it."""
    same = 0
    while same < min(len(stored), len(other)) and stored[same] == other[same]:
        same += 1
    prefix = StoredPrefix([0] * len(stored), stored, False)
    for character in other[:same]:
        output = prefix.drop(Output("r", [0], character))
        assert not output.text
    if same < min(len(stored), len(other)):
        with pytest.raises(ReplayDiffers):
            prefix.drop(Output("r", [0], other[same]))


def test_other_tokens_of_the_same_text_differ() -> None:
    """The server would go on otherwise behind them."""
    prefix = StoredPrefix([1, 2], "ab", True)
    with pytest.raises(ReplayDiffers):
        prefix.drop(Output("r", [3], "ab"))


def test_tokens_without_text_are_compared_too() -> None:
    """Special tokens have none; the replay is not complete before it has them."""
    prefix = StoredPrefix([1, 9], "a", True)
    assert prefix.drop(Output("r", [1], "a")) == Output("r")
    assert not prefix.is_complete
    assert prefix.drop(Output("r", [9, 2], "b")) == Output("r", [2], "b")
