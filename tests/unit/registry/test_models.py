"""Registry records: which names they take, and what they insist on."""

from typing import Any

import pytest
from pydantic import ValidationError

from registry.models import Model, mock_model, validate_name
from registry.tenant_records import ApiKey
from tests.support.versions import make_version, with_facts


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-0.5B",
        "gemma-3-270m",
        "_x",
        "modèle",
        "a.b",
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2",
        "A" * 47 + "/" + "A" * 48,  # the longest of the Hub
    ],
)
def test_names_as_models_have_them_are_taken(name: str) -> None:
    """Subjects escape names, so people keep the names that they know."""
    assert validate_name(name) == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "1 to 128"),
        ("a" * 129, "1 to 128"),
        ("語" * 86, "258 bytes of UTF-8"),
        ("a b", "' '"),
        ("a\n", "control"),
        ("a\0", "control"),
        ("a*", "wildcard"),
        (">", "wildcard"),
        ("m@1", "version"),
    ],
)
def test_a_refused_name_is_told_why(name: str, reason: str) -> None:
    """An operator must see which character is at fault."""
    with pytest.raises(ValueError, match=reason):
        validate_name(name)


def test_a_model_needs_its_default_version() -> None:
    """A default that is not there would fail each request instead of the one command."""
    with pytest.raises(ValidationError, match=r"'nope' is none of: 1"):
        Model.model_validate({**mock_model().model_dump(), "default_version": "nope"})


def test_fields_of_a_newer_release_are_ignored() -> None:
    """During a rolling upgrade old services read new records."""
    wire = {**mock_model(ttft_ms=5).model_dump(mode="json"), "colour": "blue"}
    assert Model.model_validate(wire).default.options == {"ttft_ms": 5}


def test_what_follows_from_files_is_the_versions() -> None:
    """A record of a release that stored it with the model gives it to every version."""
    old = {
        "name": "m",
        "engine": "transformers",
        "context_length": 64,
        "vocab_size": 9,
        "chat_template": "T",
        "versions": {"1": {"id": "1"}, "2": {"id": "2"}},
        "default_version": "1",
    }
    model = Model.model_validate(old)
    assert [v.context_length for v in model.versions.values()] == [64, 64]
    other = with_facts(model, context_length=128, chat_template=None)
    assert [v.context_length for v in other.versions.values()] == [128, 64]
    assert Model.model_validate_json(other.model_dump_json()) == other


@pytest.mark.parametrize(
    ("changed", "takes"),
    [
        ({"files": {"tokenizer.json": "a", "model.safetensors": "z", "config.json": "z"}}, True),
        ({"files": {"tokenizer.json": "z"}}, False),
        ({"files": {"tokenizer.json": "a", "merges.txt": "b"}}, False),
        ({"vocab_size": 9}, False),
        ({"chat_template": "T"}, False),
        ({"has_tokenizer": False}, False),
        ({"context_length": 1}, False),
        ({"context_length": 10**6, "options": {"x": 1}}, True),
    ],
)
def test_a_version_takes_the_prompts_of_one_that_makes_the_same_tokens(
    changed: dict[str, Any], takes: bool
) -> None:
    """Else requests that wait would be other texts to it."""
    old = make_version(files={"tokenizer.json": "a"})
    assert old.model_copy(update=changed).takes_prompts_of(old) is takes


def test_services_of_the_release_before_read_new_records() -> None:
    """They look for the default version's facts in the record of the model."""
    wire = mock_model(context_length=77).model_dump(mode="json")
    assert (wire["context_length"], wire["vocab_size"], wire["has_tokenizer"]) == (77, 256, True)


def test_a_record_survives_its_wire_form() -> None:
    """What one service writes, another reads unchanged."""
    model = mock_model("Qwen/Qwen2.5-0.5B", itl_ms=2)
    assert Model.model_validate_json(model.model_dump_json()) == model


def test_an_unreadable_record_is_described_without_its_values() -> None:
    """The description is logged, and a record may hold what is nobody's but a tenant's."""
    for record, content in (
        (Model, b'{"name": {"secret-value": 1}}'),
        (ApiKey, b'{"tenant": ["secret-value"]}'),
        (ApiKey, b'{"tenant": "secret-value'),
    ):
        with pytest.raises(ValidationError) as error:
            record.model_validate_json(content)
        assert "secret-value" not in str(error.value)
