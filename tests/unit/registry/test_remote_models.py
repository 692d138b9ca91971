"""A remote model's record: what must be said, what its tokeniser's files say, what is refused."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from millstream.models.settings import AddSettings
from registry.artifact_verification import ArtifactRefused
from registry.remote_models import RemoteRefused, RemoteServer, remote_model

SERVER = RemoteServer(url="http://corn:8000/v1", model="corn")
VLLM = SERVER.model_copy(update={"api": "vllm"})
SINGLE = SERVER.model_copy(update={"api": "single"})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    library = Tokenizer(WordLevel({"a": 0, "b": 8}, "a"))
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<end>": 2}))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


def test_the_tokenizers_files_say_the_rest(files: Path) -> None:
    """Prompts are checked, counted and rendered as those of a model of our own."""
    model = remote_model(VLLM, "far", tokenizer=files)
    version = model.default
    assert (version.context_length, version.vocab_size, version.has_tokenizer) == (77, 9, True)
    assert version.chat_template == "{{ messages }}"
    assert model.default.directory == str(files)
    assert model.default.options["context_length"] == 77


def test_without_a_tokenizer_tokens_are_estimated() -> None:
    """Its prompts are UTF-8 bytes on their way."""
    version = remote_model(SERVER, "far", context=100).default
    assert (version.vocab_size, version.has_tokenizer) == (256, False)
    assert [version.token_count(list(text.encode())) for text in ("", "a", "12345678", "é")] == [
        0,
        1,
        2,
        1,
    ]


def test_a_version_is_a_server_a_model_and_files(files: Path) -> None:
    """What else there is to say may change."""
    same = SERVER.model_copy(update={"concurrency": 3})
    other = SERVER.model_copy(update={"url": "http://other:8000/v1"})
    made = [remote_model(s, "far", context=9).default_version for s in (SERVER, same, other)]
    made.append(remote_model(SERVER, "far", context=9, tokenizer=files).default_version)
    assert made[0] == made[1]
    assert len(set(made)) == 3


def test_only_a_server_with_groups_tells_workers_of_them() -> None:
    """One of an earlier release would not know these options."""
    grouped = SINGLE.model_copy(update={"group_items": 8})
    plain, with_groups = (remote_model(s, "far", context=9).default for s in (SINGLE, grouped))
    assert with_groups.options == {**plain.options, "group_items": 8, "group_seconds": 0.05}


@pytest.mark.parametrize(
    "url",
    ["corn:8000", "ftp://corn", "http://", "http://user:pw@corn/v1", "http://corn/v1?key=k"],
)
def test_a_url_that_is_none_or_holds_a_secret_is_refused(url: str) -> None:
    """The registry is for everybody to read."""
    with pytest.raises(ValidationError):
        RemoteServer(url=url, model="m")
    with pytest.raises(ValidationError):
        AddSettings(name="far", remote=url)


def test_what_does_not_go_together_is_refused(files: Path) -> None:
    """At registration, not at the first request."""
    with pytest.raises(RemoteRefused, match="--context-length"):
        remote_model(SERVER, "far")
    with pytest.raises(RemoteRefused, match="its tokenizer"):
        remote_model(VLLM, "far", context=9)
    with pytest.raises(RemoteRefused, match="--group-items"):
        remote_model(SERVER.model_copy(update={"group_items": 2}), "far", context=9)
    with pytest.raises(RemoteRefused, match="without a tokenizer"):
        remote_model(SINGLE, "far", context=9, tokenizer=files)
    (files / "tokenizer.json").unlink()
    with pytest.raises(ArtifactRefused, match=r"tokenizer\.json"):
        remote_model(SERVER, "far", tokenizer=files)


@pytest.mark.parametrize("given", [{}, {"path": "here", "remote": "http://corn/v1"}])
def test_a_model_comes_from_a_path_or_from_a_server(given: dict[str, str]) -> None:
    """One of both, and a sentence that says so."""
    with pytest.raises(ValidationError, match="either PATH or --remote"):
        AddSettings.model_validate({"name": "m", **given})
