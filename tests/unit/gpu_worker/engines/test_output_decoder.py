"""What is emitted of a stream can be gone on from, wherever and however often it breaks."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpu_worker.engines.engine import EngineError, Sequence
from gpu_worker.engines.remote.openai_protocol import Delta, TokenLogprob
from gpu_worker.engines.remote.output_decoder import (
    OutputDecoder,
    TextOutputDecoder,
    TokenOutputDecoder,
    extend_sequence,
)
from streams.messages import Sampling

PROMPT = "Once é "
STOPS = ["aab", "b🌊", "xyz"]
texts = st.text("ab🌊 xyzé", max_size=40)


@cache
def tokenizer() -> Tokenizer:
    """Byte-level without merges: each byte is a token, so characters break across tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


def cut_at_stop(text: str, stops: list[str]) -> str:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def text_sequence(stops: list[str]) -> Sequence:
    return Sequence("r", list(PROMPT.encode()), Sampling(max_tokens=1000, stop=stops))


def continued(begun: Sequence, full: str, breaks: list[int]) -> Sequence:
    """Let a server that would say `full` break after so many characters, then go on, and so on."""
    sequence = begun
    for length in [*breaks, len(full)]:
        generation = TextOutputDecoder(sequence, None)
        prompt = generation.continuation_prompt()
        assert isinstance(prompt, str)
        assert prompt == PROMPT + sequence.text
        for character in full[len(sequence.text) :][:length]:
            sequence = extend_sequence(sequence, generation.decode_delta(Delta(character)))
            if generation.matched_stop:
                break
        if generation.matched_stop:
            return extend_sequence(sequence, generation.flush())
    return extend_sequence(sequence, generation.flush())


@given(texts, st.lists(st.integers(0, 6), max_size=8))
def test_a_text_that_breaks_anywhere_is_emitted_once(full: str, breaks: list[int]) -> None:
    """Neither a gap nor a repeat, with stop strings across the breaks."""
    sequence = continued(text_sequence(STOPS), full, breaks)
    assert sequence.text == cut_at_stop(full, STOPS)


@given(texts)
def test_tokens_are_counted_with_their_text(full: str) -> None:
    """One for each event that brought any; none is stored before its text."""
    generation, sequence = TextOutputDecoder(text_sequence([]), None), text_sequence([])
    for character in full:
        sequence = extend_sequence(sequence, generation.decode_delta(Delta(character)))
        assert len(sequence.generated) == len(sequence.text)
    assert len(sequence.generated) == len(full)


@given(texts, st.lists(st.integers(0, 9), max_size=8))
def test_tokens_that_break_anywhere_give_the_same_text(full: str, breaks: list[int]) -> None:
    """Within a character, too: the ids are replayed, as an engine of our own does."""
    tokens = ids(full)
    sequence = Sequence("r", ids(PROMPT), Sampling(max_tokens=1000, stop=STOPS))
    generation: OutputDecoder | None = None
    for length in [*breaks, len(tokens)]:
        generation = TokenOutputDecoder(sequence, tokenizer())
        assert generation.continuation_prompt() == sequence.prompt + sequence.generated
        left = tokens[len(sequence.generated) :]
        sequence = extend_sequence(sequence, generation.decode_delta(Delta("?", left[:length])))
    assert generation
    assert extend_sequence(sequence, generation.flush()).text == cut_at_stop(full, STOPS)


@given(texts)
def test_a_text_is_put_behind_token_ids_exactly(full: str) -> None:
    """A server that takes ids and tells none goes on behind prompt and text, as ids."""
    stored = Sequence("r", ids(PROMPT), generated=[0] * len(full), text=full)
    assert TextOutputDecoder(stored, tokenizer()).continuation_prompt() == ids(PROMPT + full)


def test_a_tokenizer_that_cannot_do_so_ends_the_request() -> None:
    """One that swallows a space would make the server continue another text."""
    made = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    stored = Sequence("r", [0], generated=[0], text="  two")
    with pytest.raises(EngineError, match="exactly"):
        TextOutputDecoder(stored, made).continuation_prompt()


def test_log_probabilities_have_ids_where_the_server_tells_them() -> None:
    """And their text by the model's own tokeniser; elsewhere the server's."""
    (a, b) = ids("ab")
    named = TokenLogprob(f"token_id:{a}", -0.1, {f"token_id:{b}": -2.0})
    sequence = Sequence("r", [a])
    output = TokenOutputDecoder(sequence, tokenizer()).decode_delta(Delta("a", [a], [named]))
    assert output.logprobs
    assert (output.logprobs[0].token, output.logprobs[0].text) == (a, "a")
    assert output.logprobs[0].top == [(b, "b", -2.0)]
    plain = TextOutputDecoder(sequence, None).decode_delta(
        Delta("a", None, [TokenLogprob("a", -0.1, {"b": -2.0})])
    )
    assert plain.logprobs
    assert (plain.logprobs[0].text, plain.logprobs[0].top) == ("a", [(0, "b", -2.0)])


def test_a_server_without_token_ids_is_no_vllm() -> None:
    """Its text alone would leave the token log without tokens."""
    generation = TokenOutputDecoder(Sequence("r", [1]), tokenizer())
    with pytest.raises(EngineError, match="no vLLM"):
        generation.decode_delta(Delta("text"))
