"""A model that another server runs: where it is and how it is spoken to; files, if any, are its
tokeniser's. A secret is never part of it: the key is named by a variable of the worker's.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from registry.artifacts import SHORT_DIGEST, ArtifactRefused, combine_digests, hash_files, read_json
from registry.model_inspection import read_chat_template, read_context_length
from registry.models import Model, Record, Task, Version
from streams.errors import MillstreamError

RemoteApi = Literal["openai", "vllm", "single"]
BYTE_VOCABULARY = 256


class RemoteRefused(MillstreamError):
    """A remote model cannot be registered so."""


def validate_url(url: str) -> str:
    """Return `url` if a worker may forward to it; else a `ValueError` says why not."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{parts.scheme or 'no'}://… is not an HTTP URL")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a URL here has no credentials, query or fragment: everybody may read it")
    return url


Url = Annotated[str, AfterValidator(validate_url)]


class RemoteServer(Record):
    """The server; these are the engine's options."""

    url: Url
    model: str
    api: RemoteApi = "openai"
    concurrency: int = Field(16, ge=1)
    api_key_variable: str = ""
    first_seconds: float = Field(60, gt=0)
    chunk_seconds: float = Field(30, gt=0)


def remote_model(
    server: RemoteServer,
    name: str,
    *,
    task: Task = "generate",
    tokenizer: Path | None = None,
    context: int | None = None,
    version: str | None = None,
) -> Model:
    """A record with one version. Its id is the beginning of a digest over server, model and files.

    Raises `RemoteRefused` or `ArtifactRefused`. Reads and hashes every file: call it in a thread.
    """
    _check(server, tokenizer)
    length = context or _read_context(tokenizer)
    files = hash_files(tokenizer) if tokenizer else {}
    whole = _digest(server, files)
    made = Version(
        id=version or whole[:SHORT_DIGEST],
        directory=str(tokenizer.resolve()) if tokenizer else None,
        files=files,
        digest=whole,
        options={**server.model_dump(), "context_length": length},
    )
    return Model(
        name=name,
        engine="remote",
        task=task,
        context_length=length,
        vocab_size=_vocabulary_size(tokenizer) if tokenizer else BYTE_VOCABULARY,
        has_tokenizer=tokenizer is not None,
        chat_template=read_chat_template(tokenizer) if tokenizer else None,
        versions={made.id: made},
        default_version=made.id,
    )


def _check(server: RemoteServer, tokenizer: Path | None) -> None:
    if tokenizer and not tokenizer.is_dir():
        raise RemoteRefused(f"{tokenizer} is not a directory")
    if server.api == "single" and tokenizer:
        raise RemoteRefused("a single-item API takes texts: register it without a tokenizer")
    if server.api == "vllm" and not tokenizer:
        raise RemoteRefused("vLLM tells token ids: register it with its tokenizer, or as openai")


def _read_context(tokenizer: Path | None) -> int:
    if tokenizer is None or not (tokenizer / "config.json").exists():
        raise RemoteRefused("no config.json says the context length: give --context-length")
    return read_context_length(tokenizer)


def _digest(server: RemoteServer, files: dict[str, str]) -> str:
    """What makes a version this one; limits and the key's name may change."""
    identity = json.dumps([server.url, server.model, server.api, combine_digests(files)])
    return hashlib.sha256(identity.encode()).hexdigest()


def _vocabulary_size(directory: Path) -> int:
    """One more than the highest id in tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ArtifactRefused("tokenizer.json", "is missing")
    content: dict[str, Any] = read_json(path)
    vocabulary = content.get("model", {}).get("vocab", {})
    named = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = (token["id"] for token in content.get("added_tokens", ()))
    return 1 + max((*named, *added), default=-1)
