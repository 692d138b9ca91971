"""The mock engine is an engine: paced, deterministic, bounded, and it resumes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.factory import build
from gpu_worker.engines.mock import WORDS, MockEngine
from simulation.step_model import StepModel
from streams.messages import Grammar, Sampling


class Clock:
    """Time that passes when the engine sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.001
        self.now += seconds


def _engine(clock: Clock | None = None, **options: float | StepModel) -> MockEngine:
    clock = clock or Clock()
    return MockEngine(**options, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]


def _drain(engine: MockEngine) -> list[Output]:
    outputs: list[Output] = []
    while not engine.idle:
        outputs += engine.step()
    return outputs


def _run(engine: MockEngine, sequence: Sequence) -> tuple[list[int], str, Output]:
    engine.add(sequence)
    outputs = _drain(engine)
    tokens = [token for output in outputs for token in output.tokens]
    return tokens, "".join(o.text for o in outputs), outputs[-1]


def test_words_come_at_their_times() -> None:
    """It is the clock that the pipeline is measured against."""
    clock = Clock()
    engine = _engine(clock, ttft_ms=20, itl_ms=6)
    engine.add(Sequence("a", [1], Sampling(3)))
    times: list[float] = []
    while not engine.idle:
        words = len(engine.step())
        times += [clock.now] * words
    assert times == pytest.approx([100.020, 100.026, 100.032], abs=1e-6)


STEPS = StepModel(
    step_ms=10, sequence_ms=1, context_us=100, prefill_ms=5, token_ms=2, max_batch_tokens=8
)


def _word_times(engine: MockEngine, clock: Clock) -> dict[str, list[float]]:
    """Milliseconds since the clock began at which each sequence gets its words."""
    times: dict[str, list[float]] = {}
    while not engine.idle:
        for output in engine.step():
            times.setdefault(output.request_id, []).append(1000 * (clock.now - 100))
    return times


def test_a_modelled_step_takes_as_long_as_what_is_in_it() -> None:
    """Machine types on one computer differ by their step models alone."""
    clock = Clock()
    engine = _engine(clock, step_model=STEPS)
    engine.add(Sequence("a", [1] * 4, Sampling(3)))
    first = 5 + 4 * 2  # the prompt
    second = first + 10 + 1 + 5 * 0.1  # one sequence, with its prompt and one word
    assert _word_times(engine, clock)["a"] == pytest.approx(
        [first, second, second + 10 + 1 + 6 * 0.1]
    )


def test_all_sequences_of_a_step_wait_for_the_prompts_in_it() -> None:
    """That is what a machine does whose batch is large: everybody's tokens come later."""
    clock = Clock()
    engine = _engine(clock, step_model=STEPS)
    engine.add(Sequence("a", [1], Sampling(2)))
    engine.add(Sequence("b", [1] * 10, Sampling(2)))
    times = _word_times(engine, clock)
    first = 5 + 8 * 2  # as many tokens of prompts as one step takes: all of a's, seven of b's
    second = first + 10 + 1 + 2 * 0.1 + 5 + 3 * 2  # a's next word, and the rest of b's prompt
    assert times["a"] == pytest.approx([first, second])
    assert times["b"] == pytest.approx([second, second + 10 + 1 + 11 * 0.1])


def test_a_modelled_engine_has_the_room_of_its_model() -> None:
    """The dispatcher sends as much as fits there."""
    engine = _engine(step_model=StepModel(max_sequences=2, kv_tokens=50))
    assert (engine.free_capacity().sequences, engine.free_capacity().tokens) == (2, 50)
    for name in "abc":
        engine.add(Sequence(name, [1], Sampling(4)))
    assert len(_drain(engine)) == 12


def test_a_stalled_process_says_one_word_a_step_and_goes_on_from_there() -> None:
    """As a real engine, which computes nothing while it is stopped."""
    clock = Clock()
    engine = _engine(clock, ttft_ms=10, itl_ms=10)
    engine.add(Sequence("a", [1], Sampling(5)))
    clock.now += 1
    assert len(engine.step()) == 1
    assert engine.step() == []
    clock.now += 0.01
    assert len(engine.step()) == 1


def test_without_pace_every_step_says_a_word() -> None:
    """The fastest engine there is."""
    engine = _engine(ttft_ms=0, itl_ms=0)
    engine.add(Sequence("a", [1], Sampling(3)))
    assert [len(engine.step()) for _ in range(3)] == [1, 1, 1]
    assert engine.idle


def test_text_is_a_function_of_prompt_and_seed() -> None:
    """A second attempt, or another worker, says the same."""
    texts = {
        (prompt, seed): _run(_engine(), Sequence("x", [prompt], Sampling(20, seed=seed)))[1]
        for prompt in (1, 2)
        for seed in (None, 0, 1)
    }
    assert texts[1, None] == texts[1, 0]
    assert len(set(texts.values())) == 4


def test_it_runs_to_max_tokens_and_each_token_is_a_word() -> None:
    """There is no end token."""
    tokens, text, last = _run(_engine(), Sequence("a", [1], Sampling(50)))
    assert (len(tokens), last.finish) == (50, "length")
    assert text == "".join(WORDS[token] for token in tokens)
    assert len(set(WORDS)) == 256


def test_a_stop_token_ends_the_answer_but_not_too_early() -> None:
    """The stop token counts and has no text; a resumed answer that had ended ends again."""
    whole, _, _ = _run(_engine(), Sequence("a", [1], Sampling(50)))
    ids = [whole[2], whole[9]]
    stopped = Sampling(50, stop_token_ids=ids)
    tokens, text, last = _run(_engine(), Sequence("a", [1], stopped))
    assert (tokens, last.finish) == (whole[:3], "stop")
    assert text == "".join(WORDS[token] for token in whole[:2])
    later, _, _ = _run(_engine(), Sequence("a", [1], replace(stopped, min_tokens=3)))
    assert later == whole[: later.index(later[-1]) + 1]
    assert len(later) > 3
    again, more, end = _run(_engine(), Sequence("a", [1], stopped, whole[:3]))
    assert (again, more, end.finish) == ([], "", "stop")


@given(st.integers(0, 20), st.booleans())
def test_a_resumed_sequence_continues(cut: int, stopping: bool) -> None:
    """Tokens and text go on where the stored ones ended; a finished one is finished again."""
    whole, text, _ = _run(_engine(), Sequence("a", [7], Sampling(20)))
    stop = [text[40:47]] if stopping else []
    sampling = Sampling(20, stop=stop)
    first = _engine()
    first.add(Sequence("a", [7], sampling))
    outputs: list[Output] = []
    while len(outputs) < cut and not first.idle:
        outputs += first.step()
    stored = [token for output in outputs for token in output.tokens]
    tokens, more, last = _run(_engine(), Sequence("a", [7], sampling, stored))
    full, want, end = _run(_engine(), Sequence("a", [7], sampling))
    assert stored + tokens == full == whole[: len(full)]
    assert "".join(o.text for o in outputs) + more == want
    assert last.finish == end.finish == ("stop" if stopping else "length")
    assert [last.matched_stop] == [end.matched_stop] == (stop or [""])


def test_no_more_sequences_run_than_there_are_places() -> None:
    """The others wait, first come first served, and count against the room."""
    engine = _engine(ttft_ms=10, itl_ms=10, sequences=2, kv_tokens=1000)
    for name in "abcd":
        engine.add(Sequence(name, [1], Sampling(2)))
    assert (engine.free_capacity().sequences, engine.free_capacity().tokens) == (0, 1000 - 4 * 3)
    order = [o.request_id for o in _drain(engine)]
    assert order == ["a", "b", "a", "b", "c", "d", "c", "d"]
    assert (engine.free_capacity().sequences, engine.free_capacity().tokens) == (2, 1000)


def test_cancel_frees_the_place_and_ends_once() -> None:
    """Running or waiting; again or for nobody, nothing happens."""
    engine = _engine(sequences=1)
    for name in "abc":
        engine.add(Sequence(name, [1], Sampling(2)))
    for name in ("a", "a", "c", "nobody"):
        engine.cancel(name)
    outputs = _drain(engine)
    assert [(o.request_id, o.finish) for o in outputs if o.finish] == [
        ("a", "cancelled"),
        ("c", "cancelled"),
        ("b", "length"),
    ]


@pytest.mark.parametrize(
    ("sequence", "code"),
    [
        (Sequence("a", [256], Sampling(1)), "token_out_of_range"),
        (Sequence("a", [1] * 90, Sampling(11)), "context_length_exceeded"),
        (Sequence("a", [], Sampling(1)), "unsupported_value"),
        (Sequence("a", [1], Sampling(1, logit_bias=[(256, 1.0)])), "token_out_of_range"),
        (Sequence("a", [1], Sampling(1, grammar=Grammar("json_object"))), "unsupported_value"),
    ],
)
def test_what_it_cannot_run_comes_back_as_an_error(sequence: Sequence, code: str) -> None:
    """Like every engine, so that pipelines can be tested for it."""
    engine = _engine(kv_tokens=100)
    engine.add(sequence)
    (output,) = engine.step()
    assert output.error is not None
    assert output.error.code == code
    assert engine.idle


def test_inputs_become_unit_vectors() -> None:
    """One for each input, the same each time."""
    _, _, last = _run(_engine(), Sequence("a", inputs=[[1, 2], [3], [1, 2]], dimensions=6))
    assert last.vectors is not None
    floats = [memoryview(v).cast("f").tolist() for v in last.vectors]
    assert floats[0] == floats[2] != floats[1]
    assert all(sum(x * x for x in v) == pytest.approx(1, abs=1e-5) for v in floats)
    assert [len(v) for v in floats] == [6, 6, 6]


def test_logprobs_come_with_as_many_alternatives_as_asked_for() -> None:
    """So that the path to the client can be tested without a model."""
    engine = _engine()
    engine.add(Sequence("a", [1], Sampling(1, logprobs=3)))
    (output,) = _drain(engine)
    assert output.logprobs is not None
    assert len(output.logprobs[0].top) == 3


@pytest.mark.parametrize(
    ("engine", "options", "named"),
    [("mock", {"ttft": 1}, "ttft"), ("mock", {"sequences": "many"}, "sequences"), ("m", {}, "'m'")],
)
def test_the_factory_names_what_it_does_not_know(
    engine: str, options: dict[str, float | int | str], named: str
) -> None:
    """A typo must not run with defaults."""
    with pytest.raises(ValueError, match=named):
        build(engine, None, options)
