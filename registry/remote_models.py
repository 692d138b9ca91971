"""Makes the record of a model that another server runs: its URL, API and limits.

Its files, if any, are those of its tokeniser. The record never holds a secret: it names the
environment variable of the worker that holds the API key.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from registry.artifact_verification import (
    SHORT_DIGEST,
    ArtifactRefused,
    combine_digests,
    hash_files,
)
from registry.destination_policy import THIS_MACHINE_ONLY, DestinationRefused
from registry.model_inspection import read_context_length
from registry.models import Model, Record, Task, Version
from registry.tokenizer.added_tokens import TOKENIZER, load_tokenizer
from registry.tokenizer.chat_templates import read_chat_template
from registry.upstream_addresses import validate_url
from streams.errors import MillstreamError

RemoteApi = Literal["openai", "vllm", "single"]
BYTE_VOCABULARY = 256


class RemoteRefused(MillstreamError):
    """A model on another server cannot be registered with these options; the message says why."""


Url = Annotated[str, AfterValidator(validate_url)]


class RemoteServer(Record):
    """A model server that is not part of Millstream, and how workers call it.

    The worker's remote engine gets these fields as its options. `api_key_variable` names the
    worker's environment variable that holds the API key; empty if there is none. With `group_items`
    over 1 the calls of a single-item API begin by groups, for which a request waits at most
    `group_seconds`.
    """

    url: Url
    model: str
    api: RemoteApi = "openai"
    concurrency: int = Field(16, ge=1)
    api_key_variable: str = ""
    first_seconds: float = Field(60, gt=0)
    chunk_seconds: float = Field(30, gt=0)
    group_items: int = Field(1, ge=1)
    group_seconds: float = Field(0.05, ge=0)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the worker's engine; those of groups only where there are any."""
        has_groups = self.group_items > 1
        return self.model_dump(exclude=None if has_groups else {"group_items", "group_seconds"})


def remote_model(
    server: RemoteServer,
    name: str,
    *,
    task: Task = "generate",
    tokenizer: Path | None = None,
    context: int | None = None,
    version: str | None = None,
) -> Model:
    """Return the record of a model on another server, with one version.

    `context` is the context length in tokens; None: as the tokeniser's config.json says. The
    version's id is `version` or, by default, the beginning of a digest over server, model and
    tokeniser files. Raises `RemoteRefused` for options that do not go together, `ArtifactRefused`
    for a file at fault. Reads and hashes every file: call it in a thread.
    """
    _check(server, tokenizer)
    length = context or _read_context(tokenizer)
    files = hash_files(tokenizer) if tokenizer else {}
    digest = _digest(server, files)
    made = Version(
        id=version or digest[:SHORT_DIGEST],
        directory=str(tokenizer.resolve()) if tokenizer else None,
        files=files,
        digest=digest,
        options={**server.options, "context_length": length},
        context_length=length,
        vocab_size=_vocabulary_size(tokenizer) if tokenizer else BYTE_VOCABULARY,
        has_tokenizer=tokenizer is not None,
        chat_template=read_chat_template(tokenizer) if tokenizer else None,
    )
    return Model(
        name=name,
        engine="remote",
        task=task,
        versions={made.id: made},
        default_version=made.id,
    )


def find_needed_settings(server: RemoteServer) -> list[str]:
    """Return why a worker without settings of its own would refuse this server, in sentences.

    Each names the setting that allows it. Raises `RemoteRefused` for a server that no worker may
    call, as far as the text of its URL tells.
    """
    checks = (
        (THIS_MACHINE_ONLY.check_url, server.url),
        (THIS_MACHINE_ONLY.check_key_variable, server.api_key_variable),
    )
    reasons = []
    for check, value in checks:
        try:
            check(value)
        except DestinationRefused as refused:
            if not refused.setting:
                raise RemoteRefused(str(refused)) from None
            reasons.append(str(refused))
    return reasons


def _check(server: RemoteServer, tokenizer: Path | None) -> None:
    if tokenizer and not tokenizer.is_dir():
        raise RemoteRefused(f"{tokenizer} is not a directory")
    if server.api == "single" and tokenizer:
        raise RemoteRefused("a single-item API takes texts: register it without a tokenizer")
    if server.api != "single" and server.group_items > 1:
        raise RemoteRefused("groups of calls are only for --api single: leave out --group-items")
    if server.api == "vllm" and not tokenizer:
        raise RemoteRefused("vLLM tells token ids: register it with its tokenizer, or as openai")


def _read_context(tokenizer: Path | None) -> int:
    if tokenizer is None or not (tokenizer / "config.json").exists():
        raise RemoteRefused("no config.json says the context length: give --context-length")
    return read_context_length(tokenizer)


def _digest(server: RemoteServer, files: dict[str, str]) -> str:
    """Hash what identifies a version; limits and the API key's variable may change within it."""
    identity = json.dumps([server.url, server.model, server.api, combine_digests(files)])
    return hashlib.sha256(identity.encode()).hexdigest()


def _vocabulary_size(directory: Path) -> int:
    """Return one more than the highest id of the tokeniser in a directory."""
    if not (directory / TOKENIZER).exists():
        raise ArtifactRefused(TOKENIZER, "is missing")
    library = load_tokenizer(directory, sys.maxsize)
    return 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
