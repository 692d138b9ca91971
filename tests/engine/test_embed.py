"""Vectors of the embedding engine are those of the model, however inputs are batched."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from gpu_worker.engine import Sequence
from gpu_worker.engines.embed import EmbedEngine
from tests.engine.tiny import Results, drive, prompt

CONTEXT = 64
SIZE = 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random sentence-transformers directory."""
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=256, hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=CONTEXT, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    steps = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    types = [{"path": p, "type": f"sentence_transformers.models.{t}"} for t, p in steps.items()]
    (path / "modules.json").write_text(json.dumps(types))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return path


@pytest.fixture(scope="module")
def engine(directory: Path) -> EmbedEngine:
    return EmbedEngine.load(directory, wait_ms=1, batch_inputs=8, max_batch_tokens=128)


@pytest.fixture(scope="module")
def model(directory: Path) -> BertModel:
    made: BertModel = BertModel.from_pretrained(directory)
    return made


def _direct(model: BertModel, tokens: list[int], dimensions: int = SIZE) -> np.ndarray:
    with torch.inference_mode():
        states = model(torch.tensor([tokens])).last_hidden_state[0]
    vector = states.mean(0)[:dimensions].numpy()
    unit: np.ndarray = vector / np.linalg.norm(vector)
    return unit


def _vectors(results: Results, name: str) -> list[np.ndarray]:
    return [np.frombuffer(v, "<f4") for v in results.last[name].vectors or []]


def test_vectors_equal_a_direct_computation(engine: EmbedEngine, model: BertModel) -> None:
    """Padding and neighbours leave no trace, and vectors come in the order of the inputs."""
    inputs = {f"r{n}": [prompt(10 * n + i, 3 + 7 * i) for i in range(6)] for n in range(4)}
    results = drive(engine, [Sequence(name, inputs=ids) for name, ids in inputs.items()])
    for name, ids in inputs.items():
        for found, tokens in zip(_vectors(results, name), ids, strict=True):
            np.testing.assert_allclose(found, _direct(model, tokens), atol=1e-5)


def test_more_inputs_than_a_batch_come_back_together(engine: EmbedEngine, model: BertModel) -> None:
    """One output, at the end."""
    inputs = [prompt(n, 1 + n % 40) for n in range(50)]
    results = drive(engine, [Sequence("a", inputs=inputs)])
    assert len(_vectors(results, "a")) == 50
    np.testing.assert_allclose(_vectors(results, "a")[49], _direct(model, inputs[49]), atol=1e-5)


def test_dimensions_cut_and_normalise_again(engine: EmbedEngine, model: BertModel) -> None:
    """As OpenAI's API has it."""
    results = drive(engine, [Sequence("a", inputs=[prompt(1, 9)], dimensions=5)])
    np.testing.assert_allclose(
        _vectors(results, "a")[0], _direct(model, prompt(1, 9), 5), atol=1e-5
    )


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ([[5], [256]], "token_out_of_range"),
        ([[5] * (CONTEXT + 1)], "context_length_exceeded"),
        ([[5], []], "unsupported_value"),
    ],
)
def test_a_bad_input_fails_its_request_alone(
    engine: EmbedEngine, inputs: list[list[int]], code: str
) -> None:
    """Its batch would otherwise fail with it."""
    results = drive(engine, [Sequence("bad", inputs=inputs), Sequence("good", inputs=[[5]])])
    error = results.last["bad"].error
    assert error is not None
    assert error.code == code
    assert len(_vectors(results, "good")) == 1


def test_a_failing_input_is_found_by_computing_each_alone(directory: Path) -> None:
    """A fault in the forward pass fails its request, not the batch."""
    made = EmbedEngine.load(directory, wait_ms=1)
    weights = made._model.get_parameter("embeddings.word_embeddings.weight")
    weights.data[77] = torch.nan
    bad = Sequence("bad", inputs=[[5], [77, 5], [6]])
    results = drive(made, [bad, Sequence("good", inputs=[[5], [6]])])
    error = results.last["bad"].error
    assert error is not None
    assert error.code == "engine_failed"
    assert len(_vectors(results, "good")) == 2


def test_cancel_frees_the_room_of_all_inputs(directory: Path) -> None:
    """Inputs that wait, and those already planned, are dropped."""
    made = EmbedEngine.load(directory, wait_ms=1, batch_inputs=4, max_batch_tokens=64)
    before = made.room()
    made.add(Sequence("a", inputs=[prompt(n, 30) for n in range(9)]))
    made.step()
    made.cancel("a")
    made.cancel("a")
    assert made.room() == before
    assert [(o.request_id, o.finish) for o in made.step()] == [("a", "cancelled")]
    assert made.idle


def test_a_deadline_shortens_the_wait(directory: Path) -> None:
    """The batch does not wait for others until it is too late."""
    made = EmbedEngine.load(directory, wait_ms=3_600_000, margin_ms=1000)
    results = drive(made, [Sequence("a", inputs=[[5]], deadline=time.time() + 1)])
    assert results.last["a"].finish == "stop"
