"""Description: a model's own files say what it can do."""

import json
from pathlib import Path
from typing import Any

import pytest

from registry.artifact_verification import ArtifactRefused
from registry.model_inspection import check_model, inspect_model, model_from
from tests.support.checkpoints import config_of, write_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
}
BERT = {
    "architectures": ["BertModel"],
    "max_position_embeddings": 512,
    "vocab_size": 30522,
    "hidden_size": 384,
}
MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
]


DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


def write(directory: Path, **files: Any) -> Path:
    """Write JSON files by their stem."""
    for stem, content in files.items():
        (directory / f"{stem}.json").write_text(json.dumps(content))
    return directory


def test_a_causal_model_generates(tmp_path: Path) -> None:
    """The common case, without a chat template: a base model."""
    found = inspect_model(write(tmp_path, config=LLAMA))
    assert (found.engine, found.task) == ("transformers", "generate")
    assert (found.context_length, found.vocab_size, found.chat_template) == (2048, 32000, None)


def test_a_multimodal_models_text_part_counts(tmp_path: Path) -> None:
    """Gemma 3 keeps lengths and vocabulary in `text_config`."""
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA}
    assert inspect_model(write(tmp_path, config=config)).context_length == 2048


@pytest.mark.parametrize(
    "template",
    ["{{ x }}", [{"name": "tool", "template": "t"}, {"name": "default", "template": "{{ x }}"}]],
)
def test_the_chat_template_comes_from_the_tokeniser(tmp_path: Path, template: object) -> None:
    """Both forms in which tokenizer_config.json carries templates."""
    write(tmp_path, config=LLAMA, tokenizer_config={"chat_template": template})
    assert inspect_model(tmp_path).chat_template == "{{ x }}"


def test_a_template_file_wins(tmp_path: Path) -> None:
    """transformers writes chat_template.jinja today and reads it first."""
    write(tmp_path, config=LLAMA, tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new")
    assert inspect_model(tmp_path).chat_template == "new"


def test_a_sentence_encoder_embeds(tmp_path: Path) -> None:
    """The encoder's own limit is shorter than its position table."""
    limit = {"max_seq_length": 256}
    write(tmp_path, config=BERT, modules=MODULES, sentence_bert_config=limit)
    found = inspect_model(tmp_path)
    assert (found.engine, found.task, found.context_length) == ("embed", "embed", 256)
    assert found.embedding_dimensions == 384


def test_a_sequence_classifier_classifies(tmp_path: Path) -> None:
    """Encoder or decoder; labels that a configuration leaves out are transformers' two."""
    config = {**BERT, "architectures": ["BertForSequenceClassification"]}
    found = inspect_model(write(tmp_path, config=config))
    assert (found.engine, found.task, found.num_labels) == ("classify", "classify", 2)
    config = {**LLAMA, "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "x"}}
    assert inspect_model(write(tmp_path, config=config)).num_labels == 1


@pytest.mark.parametrize(
    ("labels", "count"),
    [
        ({"num_labels": 1}, 1),
        ({"num_labels": 3, "id2label": {"0": "x"}}, 3),
        ({"num_labels": None, "id2label": {"0": "x"}}, 1),
        ({"num_labels": 1, "id2label": None}, 1),
        ({"id2label": None}, 2),
    ],
)
def test_labels_are_counted_as_transformers_does(
    tmp_path: Path, labels: dict[str, Any], count: int
) -> None:
    """A reranker from the Hub may say `num_labels` alone."""
    config = config_of("bert", "classify", **labels)
    assert check_model(write_model(tmp_path, config, engine="classify")) == []
    assert inspect_model(tmp_path).num_labels == count


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"id2label": {"1": "a", "2": "b"}}, "numbers its 2 labels 1, 2"),
        ({"id2label": {"a": "b"}}, "number them from 0"),
        ({"id2label": ["a", "b"]}, "names no labels"),
        ({"id2label": {}}, "names no labels"),
        ({"num_labels": 0}, "num_labels 0"),
        ({"num_labels": "two"}, "num_labels 'two'"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, "two labels or more"),
        ({"sbert_ce_default_activation_function": "evil.Run"}, "the activation 'evil.Run'"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Bilinear"}}, "torch.nn.Bilinear"),
        ({"sentence_transformers": "x"}, "not an object"),
    ],
)
def test_labels_and_activations_that_cannot_be_served_are_refused(
    tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    """At registration: the worker would fail at load, or at the first request."""
    config = config_of("bert", "classify")
    write_model(tmp_path, config, engine="classify")
    write(tmp_path, config=config | values)
    (found,) = check_model(tmp_path)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "longest"),
    [
        ({}, {"model_max_length": 10**30}, 512),
        ({}, {"model_max_length": 128}, 128),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}, {}, 512),
    ],
)
def test_an_input_fits_the_positions(
    tmp_path: Path, config: dict[str, Any], tokenizer_config: dict[str, Any], longest: int
) -> None:
    """RoBERTa's begin behind the padding's id; one token more would be an index error."""
    config = {**BERT, "architectures": ["XForSequenceClassification"], **config}
    write(tmp_path, config=config, tokenizer_config=tokenizer_config)
    assert inspect_model(tmp_path).context_length == longest


def test_a_dense_module_sets_the_width(tmp_path: Path) -> None:
    """Clients get as many dimensions as the last module has outputs."""
    write(tmp_path, config=BERT, modules=[*MODULES, DENSE])
    (tmp_path / "2_Dense").mkdir()
    write(tmp_path / "2_Dense", config={"in_features": 384, "out_features": 128})
    assert inspect_model(tmp_path).embedding_dimensions == 128


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BERT, "no causal language model"),
        ([], "not a JSON object"),
        ({**LLAMA, "architectures": "LlamaForCausalLM"}, "'LlamaForCausalLM', not a list"),
        ({**LLAMA, "architectures": 5}, "architectures is 5, not a list"),
        ({**LLAMA, "max_position_embeddings": True}, "max_position_embeddings"),
        ({"architectures": ["LlamaForCausalLM"], "text_config": "x"}, "text_config is 'x', not an"),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": 9}, "max_position_embeddings"),
        ({**LLAMA, "vocab_size": "many"}, "vocab_size"),
    ],
)
def test_files_that_say_too_little_are_refused(tmp_path: Path, config: Any, reason: str) -> None:
    """A guess would show up as wrong limits at every client."""
    with pytest.raises(ArtifactRefused, match=reason):
        inspect_model(write(tmp_path, config=config))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_config": []}, "tokenizer_config.json: is not a JSON object"),
        ({"modules": MODULES, "sentence_bert_config": 5}, "sentence_bert_config.json: is not"),
        ({"modules": [{"type": "sentence_transformers.models.Dense"}]}, "one Transformer"),
        ({"modules": [*MODULES, DENSE]}, "2_Dense/config.json: has in_features None"),
    ],
)
def test_a_file_of_another_shape_is_refused_by_name(
    tmp_path: Path, files: dict[str, Any], reason: str
) -> None:
    """In a sentence: a traceback would pass for a fault of ours."""
    with pytest.raises(ArtifactRefused, match=reason):
        inspect_model(write(tmp_path, config={**BERT, **LLAMA}, **files))


@pytest.mark.parametrize("templates", [[{"x": 1}], ["{{ x }}"], 5])
def test_what_is_no_template_is_none(tmp_path: Path, templates: object) -> None:
    """Then the model has none, as a base model has."""
    write(tmp_path, config=LLAMA, tokenizer_config={"chat_template": templates})
    assert inspect_model(tmp_path).chat_template is None


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """By the file's name."""
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactRefused, match="chat_template.jinja: is not UTF-8"):
        inspect_model(write(tmp_path, config=LLAMA))


def test_a_gguf_alone_is_refused(tmp_path: Path) -> None:
    """Converting takes minutes and is another command's work."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArtifactRefused, match="must be converted"):
        inspect_model(tmp_path)


def test_the_version_is_named_after_its_digest(tmp_path: Path) -> None:
    """The same files get the same version id wherever they are registered."""
    model = model_from(write_model(tmp_path, config_of("llama")), "m")
    assert model.default_version == model.default.digest[:12]
    assert list(model.default.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert model_from(tmp_path, "m", "v2", default_max_tokens=7).default_version == "v2"
