"""Defaults of sampling: what a request does not say is as the model's generation_config.json says.

Compared with `generate`, which reads the same file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import load_model
from registry.artifact_verification import ArtifactRefused, json_reader
from registry.generation_config import read_sampling_defaults
from registry.model_inspection import model_from
from streams.messages import NEUTRAL_SAMPLING, Request, Sampling, SamplingDefaults
from tests.engine.tiny_models import model, prompt, run_to_end, save

PROMPTS = [prompt(number, length) for number, length in enumerate((1, 9, 40))]
COUNT = 24


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(model("llama"), tmp_path)


def write(directory: Path, **settings: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps(settings))


def engine_tokens(directory: Path, **sampling: Any) -> list[list[int]]:
    """The tokens that an engine generates, of requests as a worker unpacks them."""
    engine = TransformersEngine(load_model(directory, "cpu"), 4, 64, 1024)
    given = Sampling(max_tokens=COUNT, ignore_eos=True, **sampling)
    unpacked = Request.unpack(Request("generate", sampling=given).pack()).sampling
    sequences = [Sequence(str(n), each, unpacked) for n, each in enumerate(PROMPTS)]
    results = run_to_end(engine, sequences)
    return [results.tokens[str(number)] for number in range(len(PROMPTS))]


def generated(directory: Path, **settings: Any) -> list[list[int]]:
    library = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    library.train(False)
    found = []
    for ids in PROMPTS:
        out = library.generate(  # type: ignore[misc]
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=-1,
            **settings,
        )
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize("penalty", [1.8, 0.7])
def test_a_repetition_penalty_is_the_models(directory: Path, penalty: float) -> None:
    """Models that repeat themselves without it come with one."""
    plain = engine_tokens(directory, temperature=0.0)
    write(directory, repetition_penalty=penalty)
    found = engine_tokens(directory, temperature=0.0)
    assert found == generated(directory) != plain
    assert engine_tokens(directory, temperature=0.0, repetition_penalty=1.0) == plain


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-9}],
)
def test_each_default_cuts_as_a_request_would(directory: Path, settings: dict[str, float]) -> None:
    """Each of these leaves the likeliest token alone, so that draws are comparable."""
    write(directory, do_sample=True, **settings)
    greedy = generated(directory)
    assert engine_tokens(directory, seed=1) == greedy
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert engine_tokens(directory, seed=1, **neutral) != greedy


@pytest.mark.parametrize("settings", [{}, {"do_sample": False}, {"max_new_tokens": 2}, None])
def test_what_is_no_default_changes_nothing(
    directory: Path, settings: dict[str, Any] | None
) -> None:
    """As in vLLM: `do_sample` alone makes nothing greedy, since the API samples by default."""
    write(directory, **(settings or {}))
    if settings is None:
        (directory / "generation_config.json").unlink()
    assert load_model(directory, "cpu").sampling_defaults == NEUTRAL_SAMPLING


def test_every_value_is_read(tmp_path: Path) -> None:
    """Whole numbers, nulls, and both ways to say that top-k is off."""
    write(tmp_path, temperature=1, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
    read = json_reader(tmp_path)
    assert read_sampling_defaults(read) == SamplingDefaults(1.0, 0.9, 20, 0.05, 1.1)
    write(tmp_path, temperature=None, top_k=-1)
    assert read_sampling_defaults(read) == NEUTRAL_SAMPLING
    write(tmp_path, top_p=0, top_k=0)
    assert read_sampling_defaults(read) == SamplingDefaults(temperature=0.0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"top_p": 3}, "top_p 3, which is no number from 0 to 1"),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": "hot"}, "temperature 'hot'"),
        ({"top_k": 1.5}, "top_k 1.5"),
        ({"min_p": True}, "min_p True"),
        ({"repetition_penalty": 0}, "repetition_penalty 0, which is no number from 0.01 to 100"),
    ],
)
def test_a_value_that_no_request_may_have_is_refused(
    directory: Path, settings: dict[str, Any], reason: str
) -> None:
    """Adding the model fails: later, clients would get errors for values that they never sent."""
    write(directory, **settings)
    with pytest.raises(ArtifactRefused, match=rf"generation_config\.json: has {reason}"):
        model_from(directory, "m")
