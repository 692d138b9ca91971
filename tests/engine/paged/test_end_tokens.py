"""Ends of an output: those that the configuration names, and the tokeniser's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import load_model
from streams.messages import Sampling
from tests.engine.tiny_models import END, model, prompt, run_to_end, tokenizer

TURN = 77  # the id of the tokeniser's end of turn


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model whose tokeniser has an end of turn that its configuration does not know."""
    model("llama").save_pretrained(tmp_path)
    content = json.loads(tokenizer().to_str())
    vocabulary = content["model"]["vocab"]
    (old,) = (text for text, number in vocabulary.items() if number == TURN)
    vocabulary["<|im_end|>"] = vocabulary.pop(old)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return tmp_path


def write(directory: Path, name: str, **content: Any) -> None:
    (directory / name).write_text(json.dumps(content))


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>"}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("generation", "ends"), [({}, {END}), ({"eos_token_id": [3, 4]}, {3, 4}), (None, {END})]
)
def test_the_tokenizers_end_counts_beside_the_configurations(
    directory: Path, eos: object, file: str, generation: dict[str, Any] | None, ends: set[int]
) -> None:
    """As in vLLM: models that were tuned for chats often have their end of turn there alone."""
    write(directory, file, eos_token=eos)
    if generation is None:
        (directory / "generation_config.json").unlink()
    else:
        write(directory, "generation_config.json", **generation)
    assert load_model(directory, "cpu").eos_ids == {*ends, TURN}


@pytest.mark.parametrize("settings", [None, {}, {"eos_token": None}, {"eos_token": "<none>"}])
def test_a_tokenizer_without_an_end_adds_none(
    directory: Path, settings: dict[str, Any] | None
) -> None:
    """A text that is no token of the model, and would need an embedding, ends nothing."""
    if settings is not None:
        write(directory, "tokenizer_config.json", **settings)
    assert load_model(directory, "cpu").eos_ids == {END}


def test_an_output_ends_at_the_tokenizers_end(directory: Path) -> None:
    """Its text is left out, as that of every end token; `ignore_eos` goes on behind it."""
    write(directory, "tokenizer_config.json", eos_token="<|im_end|>")
    engine = TransformersEngine(load_model(directory, "cpu"), 4, 64, 512)
    sampling: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "logit_bias": [(TURN, 100.0)]}
    ending = Sequence("ends", prompt(1, 9), Sampling(**sampling))
    ignoring = Sequence("ignores", prompt(1, 9), Sampling(**sampling, ignore_eos=True))
    results = run_to_end(engine, [ending, ignoring])
    assert results.tokens == {"ends": [TURN], "ignores": [TURN] * 5}
    assert results.text["ends"] == ""
    assert results.terminals["ends"].finish == "stop"
