"""A tokeniser of another model, or a template that cannot be parsed, is refused."""

from pathlib import Path

import pytest

from registry.model_inspection import check_model
from tests.support.checkpoints import config_of, tokenizer_of, write_json, write_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A whole Llama with 32 embeddings."""
    return write_model(tmp_path, config_of("llama"))


def found(directory: Path) -> list[tuple[bool, str]]:
    return [(each.is_refusal, f"{each.path}: {each.reason}") for each in check_model(directory)]


def test_a_missing_tokenizer_is_refused(directory: Path) -> None:
    """Older files are not read."""
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(b"")
    assert "has no tokenizer.json" in found(directory)[0][1]


@pytest.mark.parametrize("content", ["{}", "[]", '{"version": "1.0", "model": {"type": "Own"}}'])
def test_a_tokeniser_that_cannot_be_loaded_is_refused(directory: Path, content: str) -> None:
    """Gateways load it, too: no request for the model could be taken."""
    (directory / "tokenizer.json").write_text(content)
    assert "tokenizer.json: is no tokeniser" in found(directory)[0][1]


def test_a_larger_vocabulary_is_refused(directory: Path) -> None:
    """Its tokens would be ids without embeddings."""
    write_json(directory / "tokenizer.json", tokenizer_of(40))
    ((refused, reason),) = found(directory)
    assert refused
    assert "8 tokens up to id 39" in reason
    assert "vocab_size 32" in reason


def test_a_smaller_vocabulary_is_no_fault(directory: Path) -> None:
    """Embeddings are padded to round sizes."""
    write_json(directory / "tokenizer.json", tokenizer_of(20))
    assert found(directory) == []


def test_unigram_vocabularies_are_lists(directory: Path) -> None:
    """Their ids are the places in the list."""
    pieces = [["a", 0.0]] * 40
    write_json(directory / "tokenizer.json", {"model": {"type": "Unigram", "vocab": pieces}})
    assert "8 tokens up to id 39" in found(directory)[0][1]


def test_an_added_token_without_embedding_matters_where_the_template_writes_it(
    directory: Path,
) -> None:
    """Gemma 3's text models have a token for images beyond their embeddings."""
    write_json(directory / "tokenizer.json", tokenizer_of(32, image=32))
    ((refused, reason),) = found(directory)
    assert not refused
    assert "up to id 32" in reason
    (directory / "chat_template.jinja").write_text("{{ 'image' }}")
    ((refused, reason),) = found(directory)
    assert refused
    assert "up to id 32" in reason


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_damaged_tokenizer_is_refused(directory: Path, content: str) -> None:
    """By its name."""
    (directory / "tokenizer.json").write_text(content)
    assert any("tokenizer.json: " in reason for refused, reason in found(directory) if refused)


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}", "{{ x | nosuchfilter }}", "{% x %}"]
)
def test_a_template_that_cannot_be_parsed_is_refused(directory: Path, template: str) -> None:
    """Every chat would fail, with an error that the client cannot mend."""
    (directory / "chat_template.jinja").write_text(template)
    ((refused, reason),) = found(directory)
    assert refused
    assert reason.startswith("chat_template.jinja: the chat template cannot be parsed")
    assert "line 1" in reason


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_the_refusal_names_the_file_that_has_the_template(directory: Path, file: str) -> None:
    """The user has to mend that one."""
    write_json(directory / file, {"chat_template": "{% x %}"})
    ((refused, reason),) = found(directory)
    assert refused
    assert reason.startswith(f"{file}: the chat template cannot be parsed")


def test_what_transformers_adds_to_jinja_is_known(directory: Path) -> None:
    """Loop controls, the tag around answers, tojson."""
    answer = "{% generation %}{{ m | tojson }}{% endgeneration %}"
    template = "{% for m in messages %}" + answer + "{% break %}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    assert found(directory) == []
