"""Checks a model's tokenizer.json and chat template: there, whole, and of this model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from registry.artifact_verification import ArtifactRefused, read_json
from registry.checkpoints.findings import Finding
from registry.checkpoints.template_syntax import syntax_error
from registry.tokenizer.added_tokens import TOKENIZER
from registry.tokenizer.chat_templates import template_file


def check_tokenizer(
    directory: Path, embeddings: int, chat_template: str | None
) -> Iterator[Finding]:
    """Yield what is wrong with tokenizer.json for a model with this number of embeddings.

    Added tokens beyond the embeddings are refused only if the chat template writes them: some
    models have more, such as Gemma 3, whose text models come with a token for images.
    """
    try:
        content = read_json(directory / TOKENIZER)
        vocabulary, added = _vocabulary_ids(content), _added_tokens(content)
    except (ArtifactRefused, TypeError, KeyError, AttributeError) as error:
        reason = error.reason if isinstance(error, ArtifactRefused) else "has no model and vocab"
        yield Finding(TOKENIZER, f"{reason}; save the tokeniser again")
        return
    beyond = [number for number in vocabulary - added.keys() if number >= embeddings]
    used = [n for n, text in added.items() if n >= embeddings and text in (chat_template or "")]
    unused = [n for n in added if n >= embeddings and n not in used]
    if beyond or used:
        yield Finding(TOKENIZER, _beyond([*beyond, *used], embeddings))
    elif unused:
        yield Finding(TOKENIZER, _beyond(unused, embeddings), is_refusal=False)


def check_template(directory: Path, chat_template: str | None) -> Iterator[Finding]:
    """Yield the error of a chat template that cannot be parsed; None has no error."""
    if chat_template and (error := syntax_error(chat_template)):
        reason = f"the chat template cannot be parsed: {error}; mend or remove it (without one, "
        yield Finding(template_file(directory), reason + "chats are rendered as a plain dialogue)")


def _beyond(ids: list[int], embeddings: int) -> str:
    return (
        f"has {len(ids)} tokens up to id {max(ids)}, for which the model has no embeddings "
        f"(vocab_size {embeddings}): it is of another model, or tokens were added to it alone"
    )


def _vocabulary_ids(tokenizer: Mapping[str, Any]) -> set[int]:
    """Return the ids of a tokeniser's own vocabulary, without added tokens."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, Mapping):
        return {int(number) for number in vocabulary.values()}
    return set(range(len(vocabulary)))  # Unigram: pairs of a piece and its score, by id


def _added_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    return {int(t["id"]): str(t["content"]) for t in tokenizer.get("added_tokens") or []}
