"""Vectors are those of the model and the modules around it, however inputs are batched."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, PreTrainedModel

from gpu_worker.engines.checkpoints.loading import UnsupportedModel
from gpu_worker.engines.engine import DeviceLost, Sequence
from gpu_worker.engines.unary.embed import EmbedEngine
from registry.artifact_verification import ArtifactRefused
from tests.engine.tiny_encoders import CONTEXT, SIZE, encoder, prompt
from tests.engine.tiny_models import Results, run_to_end

POOLINGS = ["mean", "cls", "lasttoken"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder(tmp_path_factory.mktemp("bert"), "bert", "mean")


@pytest.fixture(scope="module")
def engine(directory: Path) -> EmbedEngine:
    return EmbedEngine.load(directory, batch_inputs=8, max_batch_tokens=128)


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    made: PreTrainedModel = AutoModel.from_pretrained(directory)
    return made


def _pooled(model: PreTrainedModel, tokens: list[int], pooling: str = "mean") -> torch.Tensor:
    with torch.inference_mode():
        states = model(torch.tensor([tokens])).last_hidden_state[0]
    pooled: torch.Tensor = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[
        pooling
    ]
    return pooled


def _unit(vector: torch.Tensor) -> np.ndarray:
    made: np.ndarray = (vector / vector.norm()).numpy()
    return made


def _vectors(results: Results, name: str) -> list[np.ndarray]:
    return [np.frombuffer(v, "<f4") for v in results.terminals[name].vectors or []]


def test_vectors_equal_a_direct_computation(engine: EmbedEngine, model: PreTrainedModel) -> None:
    """Padding and neighbours leave no trace, and vectors come in the order of the inputs."""
    inputs = {f"r{n}": [prompt(10 * n + i, 3 + 7 * i) for i in range(6)] for n in range(4)}
    results = run_to_end(engine, [Sequence(name, inputs=ids) for name, ids in inputs.items()])
    for name, ids in inputs.items():
        for found, tokens in zip(_vectors(results, name), ids, strict=True):
            np.testing.assert_allclose(found, _unit(_pooled(model, tokens)), atol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("architecture", ["bert", "qwen3"])
def test_each_pooling_is_the_directorys(tmp_path: Path, architecture: str, pooling: str) -> None:
    """Also of a decoder, whose last token alone has seen them all; alone and in one batch."""
    encoder(tmp_path, architecture, pooling, normalise=False)
    made = EmbedEngine.load(tmp_path)
    model: PreTrainedModel = AutoModel.from_pretrained(tmp_path)
    inputs = [prompt(n, length) for n, length in enumerate((1, 30, 7, CONTEXT, 2))]
    together = _vectors(run_to_end(made, [Sequence("all", inputs=inputs)]), "all")
    for number, tokens in enumerate(inputs):
        (alone,) = _vectors(run_to_end(made, [Sequence("one", inputs=[tokens])]), "one")
        expected = _pooled(model, tokens, pooling).numpy()
        np.testing.assert_allclose(alone, expected, atol=2e-5)
        np.testing.assert_allclose(together[number], expected, atol=2e-5)


def test_the_older_style_of_pooling_is_read(tmp_path: Path) -> None:
    """Most directories on the hub were written by older versions."""
    encoder(tmp_path, "qwen3", "mean")
    flags = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    settings = {"word_embedding_dimension": SIZE, "include_prompt": True, **flags}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(settings))
    results = run_to_end(EmbedEngine.load(tmp_path), [Sequence("a", inputs=[prompt(1, 9)])])
    model: PreTrainedModel = AutoModel.from_pretrained(tmp_path)
    expected = _unit(_pooled(model, prompt(1, 9), "lasttoken"))
    np.testing.assert_allclose(_vectors(results, "a")[0], expected, atol=1e-5)


def test_a_dense_layer_follows_the_pooling(tmp_path: Path) -> None:
    """With its activation, and then the norm."""
    encoder(tmp_path, "bert", "cls", dense=12)
    results = run_to_end(EmbedEngine.load(tmp_path), [Sequence("a", inputs=[prompt(1, 9)])])
    weights = load_file(tmp_path / "2_Dense/model.safetensors")
    model: PreTrainedModel = AutoModel.from_pretrained(tmp_path)
    pooled = _pooled(model, prompt(1, 9), "cls")
    expected = _unit(torch.tanh(weights["linear.weight"] @ pooled + weights["linear.bias"]))
    np.testing.assert_allclose(_vectors(results, "a")[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "maximum"}, "maximum"),
        ("modules.json", [{"path": "", "type": "x.CNN"}], "CNN"),
    ],
)
def test_modules_that_are_unknown_are_refused_by_name(
    tmp_path: Path, file: str, content: object, reason: str
) -> None:
    """At load: vectors of another model than the one that was registered would go unnoticed."""
    encoder(tmp_path, "bert", "mean")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ArtifactRefused, match=reason):
        EmbedEngine.load(tmp_path)


def test_more_inputs_than_a_batch_come_back_together(
    engine: EmbedEngine, model: PreTrainedModel
) -> None:
    """One output, at the end."""
    inputs = [prompt(n, 1 + n % 40) for n in range(50)]
    results = run_to_end(engine, [Sequence("a", inputs=inputs)])
    assert len(_vectors(results, "a")) == 50
    np.testing.assert_allclose(
        _vectors(results, "a")[49], _unit(_pooled(model, inputs[49])), atol=1e-5
    )


def test_dimensions_cut_and_normalise_again(engine: EmbedEngine, model: PreTrainedModel) -> None:
    """As OpenAI's API has it."""
    results = run_to_end(engine, [Sequence("a", inputs=[prompt(1, 9)], dimensions=5)])
    expected = _unit(_pooled(model, prompt(1, 9))[:5])
    np.testing.assert_allclose(_vectors(results, "a")[0], expected, atol=1e-5)


def test_dimensions_of_vectors_without_a_norm_are_only_cut(tmp_path: Path) -> None:
    """Their length means something, as it does uncut."""
    encoder(tmp_path, "bert", "mean", normalise=False)
    results = run_to_end(EmbedEngine.load(tmp_path), [Sequence("a", inputs=[[5, 6]], dimensions=5)])
    model: PreTrainedModel = AutoModel.from_pretrained(tmp_path)
    np.testing.assert_allclose(
        _vectors(results, "a")[0], _pooled(model, [5, 6])[:5].numpy(), atol=1e-5
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
    results = run_to_end(engine, [Sequence("bad", inputs=inputs), Sequence("good", inputs=[[5]])])
    error = results.terminals["bad"].error
    assert error is not None
    assert error.code == code
    assert len(_vectors(results, "good")) == 1


def test_a_failing_input_is_found_by_computing_each_alone(directory: Path) -> None:
    """A fault in the forward pass fails its request, not the batch."""
    made = EmbedEngine.load(directory)
    weights = made.head.model.get_parameter("embeddings.word_embeddings.weight")
    weights.data[77] = torch.nan
    bad = Sequence("bad", inputs=[[5], [77, 5], [6]])
    results = run_to_end(made, [bad, Sequence("good", inputs=[[5], [6]])])
    error = results.terminals["bad"].error
    assert error is not None
    assert error.code == "engine_failed"
    assert len(_vectors(results, "good")) == 2


def test_a_lost_device_is_not_blamed_on_a_request(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fault in a kernel every call fails: other workers shall have these requests."""
    made = EmbedEngine.load(directory)

    def fail(inputs: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access")

    monkeypatch.setattr(made, "_forward", fail)
    made.add(Sequence("a", inputs=[[5]]))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        run_to_end(made, [Sequence("b", inputs=[[6]])])


def test_cancel_frees_the_room_of_all_inputs(directory: Path) -> None:
    """Inputs that wait, and those already planned, are dropped."""
    made = EmbedEngine.load(directory, batch_inputs=4, max_batch_tokens=64)
    before = made.free_capacity()
    made.add(Sequence("a", inputs=[prompt(n, 30) for n in range(9)]))
    made.step()
    made.cancel("a")
    made.cancel("a")
    assert made.free_capacity() == before
    assert [(o.request_id, o.finish) for o in made.step()] == [("a", "cancelled")]
    assert made.idle


@pytest.mark.parametrize("past", [{"deadline": 1.0}, {"goal": 1.0}])
def test_a_time_that_is_near_leaves_none_to_wait(directory: Path, past: Any) -> None:
    """Whatever waiting would bring: the next step runs it."""
    made = EmbedEngine.load(directory)
    made.batcher.compute_useful_wait = lambda: 3600.0  # type: ignore[method-assign]
    made.add(Sequence("a", inputs=[[5]], **past))
    assert [output.finish for output in made.step()] == ["stop"]


def test_a_model_that_padding_changes_is_refused(tmp_path: Path) -> None:
    """Its vectors would depend on the texts of others that share a batch."""
    encoder(tmp_path, "nystromformer", "mean")
    with pytest.raises(UnsupportedModel, match="NystromformerModel .* depends on the inputs"):
        EmbedEngine.load(tmp_path, device="cpu")


def test_a_layer_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    """The worker checks what `models add` checked, since a file may have changed since."""
    encoder(tmp_path, "bert", "mean", dense=8)
    file = tmp_path / "2_Dense/model.safetensors"
    weights = load_file(file)
    save_file({"linear.weight": weights["linear.weight"]}, file)
    with pytest.raises(ArtifactRefused, match=r"2_Dense/model\.safetensors: has no linear\.bias"):
        EmbedEngine.load(tmp_path, device="cpu")


def test_a_model_that_fails_in_its_first_batch_is_refused_by_name(tmp_path: Path) -> None:
    """Whatever its code raises; a raw error would name neither model nor way out."""
    encoder(tmp_path, "bert", "mean")
    head = EmbedEngine.load_head(tmp_path, torch.device("cpu"))
    head.model.set_input_embeddings(torch.nn.Identity())
    with pytest.raises(UnsupportedModel, match="BertModel cannot run on this engine: it fails: "):
        EmbedEngine(head, CONTEXT)
