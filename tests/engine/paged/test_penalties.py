"""Penalties, bias and min-p change the logits as their definitions say, and survive a crash."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.paged.penalties import build_penalties
from gpu_worker.engines.paged.sampler import RowSampling, sample
from streams.messages import ResolvedSampling
from tests.engine.tiny_models import END, VOCABULARY, engine, prompt, run_to_end

COUNT = 40
SAMPLINGS = {
    "repetition": ResolvedSampling(COUNT, temperature=0, repetition_penalty=1.3),
    "presence": ResolvedSampling(COUNT, temperature=0.7, seed=1, presence_penalty=1.5),
    "frequency": ResolvedSampling(COUNT, temperature=0.7, seed=2, frequency_penalty=-0.8),
    "bias": ResolvedSampling(COUNT, temperature=1, seed=3, logit_bias=[(END, -100.0), (65, 4.0)]),
    "min_p": ResolvedSampling(COUNT, temperature=1.5, seed=4, min_p=0.2),
    "all": ResolvedSampling(
        COUNT,
        temperature=0.9,
        seed=5,
        min_p=0.05,
        repetition_penalty=0.9,
        presence_penalty=-0.5,
        frequency_penalty=0.4,
        logit_bias=[(66, 2.5)],
        logprobs=2,
    ),
    "none": ResolvedSampling(COUNT, temperature=1, seed=6),
}


def _sequences() -> list[Sequence]:
    return [Sequence(n, prompt(i, 8 + 5 * i), s) for i, (n, s) in enumerate(SAMPLINGS.items())]


def _plainly(
    logits: list[float], sampling: ResolvedSampling, before: list[int], output: list[int]
) -> list[float]:
    """OpenAI's and vLLM's definitions, token by token."""
    changed = []
    for token, value in enumerate(logits):
        value += dict(sampling.logit_bias).get(token, 0.0)
        if token in before or token in output:
            factor = sampling.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= sampling.frequency_penalty * output.count(token)
        value -= sampling.presence_penalty * (token in output)
        changed.append(value)
    return changed


ids = st.integers(0, 149)


@given(
    before=st.lists(ids, max_size=100),
    output=st.lists(ids, max_size=200),
    cut=st.integers(0, 200),
    factor=st.floats(0.5, 2),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    bias=st.dictionaries(ids, st.floats(-100, 100), max_size=5),
)
@settings(max_examples=50)
def test_logits_change_as_the_definitions_say(
    before: list[int],
    output: list[int],
    cut: int,
    factor: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    """Whichever part of the output an earlier attempt made."""
    sampling = ResolvedSampling(
        repetition_penalty=factor,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=[*bias.items()],
    )
    row = torch.randn(150, generator=torch.Generator().manual_seed(len(output)))
    want = _plainly(row.tolist(), sampling, before, output)
    if made := build_penalties(sampling, before, output[:cut], torch.device("cpu")):
        for token in output[cut:]:
            made.count_token(token)
        made.apply(row)
    assert row.tolist() == pytest.approx(want, abs=1e-3, rel=1e-4)


def test_who_asks_for_none_pays_for_none() -> None:
    """A batch without them runs as if there were no such thing."""
    assert build_penalties(ResolvedSampling(), [1, 2], [3], torch.device("cpu")) is None


def test_a_penalised_sequence_is_the_same_alone_in_company_and_behind_a_crash() -> None:
    """What was counted is a function of the tokens, wherever they were made."""
    together = run_to_end(engine(), _sequences(), every=2).tokens
    alone = engine()
    for sequence in _sequences():
        name = sequence.request_id
        whole = run_to_end(alone, [sequence]).tokens[name]
        assert together[name] == whole
        for cut in (1, len(whole) // 2):
            resumed = replace(sequence, generated=whole[:cut])
            assert run_to_end(alone, [resumed]).tokens[name] == whole[cut:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_forces_a_token_and_minus_100_bans_it(temperature: float) -> None:
    """OpenAI's promise."""
    for token in (7, 200):
        forced = ResolvedSampling(12, temperature=temperature, logit_bias=[(token, 100.0)])
        assert (
            run_to_end(engine(), [Sequence("a", prompt(1, 9), forced)]).tokens["a"] == [token] * 12
        )
    banned = [(token, -100.0) for token in range(VOCABULARY) if token not in (65, 66)]
    two = ResolvedSampling(12, temperature=temperature, logit_bias=banned)
    assert set(run_to_end(engine(), [Sequence("a", prompt(1, 9), two)]).tokens["a"]) <= {65, 66}


def test_logprobs_are_the_models_own() -> None:
    """Whatever was forced, the client sees what the model thought of it."""
    forced = ResolvedSampling(1, temperature=0, logprobs=2, logit_bias=[(7, 100.0)])
    free = ResolvedSampling(1, temperature=0, logprobs=VOCABULARY)
    results = run_to_end(
        engine(), [Sequence("forced", prompt(1, 9), forced), Sequence("free", prompt(1, 9), free)]
    )
    (mine,), (all_of_them,) = (
        results.terminals["forced"].logprobs or [],
        results.terminals["free"].logprobs or [],
    )
    want = {token: value for token, _, value in all_of_them.top}
    assert mine.token == 7
    assert mine.logprob == pytest.approx(want[7], abs=1e-4)
    assert [t for t, _, _ in mine.top] == [t for t, _, _ in all_of_them.top[:2]]


@given(
    min_p=st.floats(0.01, 1),
    top_p=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([0, 5]),
    temperature=st.floats(0.2, 2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=50)
def test_min_p_cuts_before_the_other_cuts(
    min_p: float, top_p: float, top_k: int, temperature: float, seed: int
) -> None:
    """As in vLLM: after the temperature; top-p is a share of what min-p and top-k have left."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 2
    weights = (logits[0].double() / temperature).softmax(-1)
    weights = weights * (weights >= min_p * weights.max() * (1 - 1e-6))
    ordered = weights.sort(descending=True)
    left = ordered.values[: top_k or None]
    before = (left.cumsum(-1) - left) / left.sum()
    nucleus = (before < top_p * (1 + 1e-6)) & (left > 0)
    allowed = set(ordered.indices[: len(left)][nucleus].tolist())
    sampling = ResolvedSampling(temperature=temperature, min_p=min_p, top_p=top_p, top_k=top_k)
    choices = [RowSampling(sampling, (i + 0.5) / 200) for i in range(200)]
    drawn = {s.token for s in sample(logits.repeat(200, 1), choices)}
    assert drawn <= allowed
    assert int(logits.argmax()) in drawn
