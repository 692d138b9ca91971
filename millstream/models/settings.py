"""Settings of `millstream models …` and `millstream alias …`."""

from collections.abc import Set
from pathlib import Path

from pydantic import ByteSize, Field, ValidationInfo, model_validator
from pydantic.config import JsonDict

from millstream.admin.settings import AdminClientSettings
from registry.models import GenerationConfig, LatencyGoals, ModelName, Task
from registry.remote_models import RemoteApi, Url
from streams.base_settings import FLAG_ONLY, POSITIONAL, UPSTREAM_PREFIX, LogLevel, Settings, Slug
from streams.subjects import Priority, token

_SCOPE_KEY = "of"
MODEL: JsonDict = {_SCOPE_KEY: "model"}  # not for an adapter
SERVER: JsonDict = {_SCOPE_KEY: "server"}  # only for a remote model


class AddSettings(AdminClientSettings):
    """Settings of `millstream models add`: what to register, and its name, limits and goals.

    Exactly one of `path` (a directory with files) and `remote` (a server's URL) must be given.
    Flags that do not fit that choice, or that do not fit an adapter, fail validation.
    """

    path: Path | None = Field(
        None,
        description="directory with the model's files: safetensors, JSON, tokeniser",
        json_schema_extra=POSITIONAL,
    )
    name: ModelName = Field(description="name that clients ask for")
    version: ModelName | None = Field(
        None,
        description="name of this version; by default the beginning of its digest",
        json_schema_extra=MODEL,
    )
    why: str = Field("", max_length=500, description="why; kept in the audit log")
    alias: ModelName | None = Field(
        None, description="another name for this model", json_schema_extra=MODEL
    )
    adapter_of: str | None = Field(
        None, description="the files are a LoRA adapter of this model: ask for it as MODEL:NAME"
    )
    remote: Url | None = Field(
        None,
        description="instead of PATH, the URL of a server that runs the model: up to and with /v1 "
        "for OpenAI's API, the whole of it for a single-item API",
    )
    remote_model: str | None = Field(
        None,
        description="what the server calls the model; by default the same name",
        json_schema_extra=SERVER,
    )
    api: RemoteApi = Field("openai", description="what the server speaks", json_schema_extra=SERVER)
    task: Task = Field(
        "generate", description="what the remote model does", json_schema_extra=SERVER
    )
    tokenizer: Path | None = Field(
        None,
        description="directory with the remote model's tokenizer.json; without: texts only",
        json_schema_extra=SERVER,
    )
    context_length: int | None = Field(
        None,
        ge=1,
        description="tokens of the remote model's context; by default of config.json",
        json_schema_extra=SERVER,
    )
    concurrency: int = Field(
        16,
        ge=1,
        description="most calls of a worker to the server at once",
        json_schema_extra=SERVER | FLAG_ONLY,
    )
    api_key_variable: str = Field(
        "",
        description="environment variable of the worker that holds the server's API key: "
        f"{UPSTREAM_PREFIX}*, or one that its --upstream-key-variable names",
        json_schema_extra=SERVER,
    )
    prompt_price: float | None = Field(
        None,
        ge=0,
        description="price of a million prompt tokens, for caps on spending",
        json_schema_extra=MODEL,
    )
    completion_price: float | None = Field(
        None, ge=0, description="price of a million generated tokens", json_schema_extra=MODEL
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens of an answer whose request names no limit; what is left of the "
        "context unless told (/v1/completions: 16, as OpenAI's)",
        json_schema_extra=MODEL,
    )
    generation_config: GenerationConfig | None = Field(
        None,
        description="what a request does not say of sampling: as generation_config.json has it "
        "(auto, the default), or as OpenAI's API (none)",
        json_schema_extra=MODEL,
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens that a request may ask for",
        json_schema_extra=MODEL | FLAG_ONLY,
    )
    interactive_goal_ms: float | None = Field(
        None,
        gt=0,
        description="longest time to first token that interactive requests should see",
        json_schema_extra=MODEL,
    )
    standard_goal_ms: float | None = Field(
        None, gt=0, description="the same of standard requests", json_schema_extra=MODEL
    )
    batch_goal_ms: float | None = Field(
        None, gt=0, description="the same of batch requests", json_schema_extra=MODEL
    )
    first_seconds: float = Field(
        60,
        gt=0,
        description="time for the server's first token, or its whole answer",
        json_schema_extra=SERVER,
    )
    chunk_seconds: float = Field(
        30, gt=0, description="time between the parts of a stream", json_schema_extra=SERVER
    )
    group_items: int = Field(
        1,
        ge=1,
        description="calls of a single-item API begin by groups of so many inputs",
        json_schema_extra=SERVER,
    )
    group_seconds: float = Field(
        0.05,
        ge=0,
        description="most that a request waits for its group to fill; less where it has a goal",
        json_schema_extra=SERVER,
    )

    @property
    def goals(self) -> dict[Priority, LatencyGoals]:
        """The latency goals that were given, by priority: each a longest time to first token in ms.

        A priority without a goal is absent; the dict is empty if no goal was given.
        """
        goals_ms = {
            Priority.INTERACTIVE: self.interactive_goal_ms,
            Priority.STANDARD: self.standard_goal_ms,
            Priority.BATCH: self.batch_goal_ms,
        }
        return {
            priority: LatencyGoals(time_to_first_token_ms=ms)
            for priority, ms in goals_ms.items()
            if ms is not None
        }

    @model_validator(mode="after")
    def _has_one_source(self, info: ValidationInfo) -> "AddSettings":
        """Check that the flags fit the source.

        Only flags are checked: keys of the file or environment may be meant for other models.
        """
        flags = (info.context or {}).get("flags", self.model_fields_set)
        if (self.path is None) == (self.remote is None):
            raise ValueError("give either PATH or --remote")
        if self.path and (given := _flags_of_kind(flags, "server")):
            raise ValueError(f"only for --remote: {given}")
        if self.adapter_of:
            self._check_adapter(flags)
        return self

    def _check_adapter(self, flags: Set[str]) -> None:
        if self.path is None:
            raise ValueError("an adapter has a PATH")
        if given := _flags_of_kind(flags, "model"):
            raise ValueError(f"not for an adapter: {given}")
        token(self.name)


def _flags_of_kind(flags: Set[str], kind: str) -> str:
    """The flags among `flags` that are marked with this kind, joined by commas."""
    extras = {name: info.json_schema_extra for name, info in AddSettings.model_fields.items()}
    of_kind = [
        name for name, e in extras.items() if isinstance(e, dict) and e.get(_SCOPE_KEY) == kind
    ]
    return ", ".join("--" + name.replace("_", "-") for name in of_kind if name in flags)


class CheckSettings(Settings):
    """Settings of `millstream models check`: a directory, and a worker's settings of memory."""

    log_level: LogLevel = Field("error", description="least severe log event to write")
    path: Path = Field(
        description="directory with the model's or adapter's files", json_schema_extra=POSITIONAL
    )
    adapter_of: Path | None = Field(
        None, description="directory of the model whose LoRA adapter is in PATH"
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of lines")
    max_sequences: int = Field(64, ge=1, description="sequences in one running batch of the worker")
    max_batch_tokens: int = Field(512, ge=1, description="tokens in one forward pass")
    memory: ByteSize | None = Field(
        None, description="memory that the model may take, as 8GiB; its share of what is free now"
    )


class ListSettings(AdminClientSettings):
    """Settings of `millstream models list`."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class ShowSettings(ListSettings):
    """Settings of `millstream models show`."""

    name: str = Field(description="name of a registered model", json_schema_extra=POSITIONAL)


class RemoveSettings(AdminClientSettings):
    """Settings of `millstream models remove`."""

    name: str = Field(
        description="name of a registered model or alias, or MODEL:ADAPTER",
        json_schema_extra=POSITIONAL,
    )


class HistorySettings(ListSettings):
    """Settings of `millstream models history`."""

    name: str = Field(
        description="name of a model or alias, registered or not any more",
        json_schema_extra=POSITIONAL,
    )


class DiffSettings(AdminClientSettings):
    """Settings of `millstream models diff`."""

    old: str = Field(
        description="a MODEL@VERSION, a model or an alias", json_schema_extra=POSITIONAL
    )
    new: str = Field(description="what it is compared with", json_schema_extra=POSITIONAL)
    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class AliasBackSettings(AdminClientSettings):
    """Settings of `millstream alias back`."""

    name: ModelName = Field(description="the alias", json_schema_extra=POSITIONAL)
    why: str = Field("", max_length=500, description="why; kept in the audit log")
    as_json: bool = Field(False, alias="json", description="print JSON instead of a sentence")


class ServeSettings(AdminClientSettings):
    """Settings of `millstream models serve` and `unserve`."""

    model: str = Field(
        description="MODEL, or MODEL@VERSION to stay at one version", json_schema_extra=POSITIONAL
    )
    on: Slug = Field(
        description="a type of machine, for all of its workers, or a worker's id",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of a sentence")


class AliasSettings(AdminClientSettings):
    """Settings of `millstream alias set`."""

    name: ModelName = Field(
        description="the name that clients may ask for", json_schema_extra=POSITIONAL
    )
    expected: str | None = Field(
        None, description="refuse unless it means this now, as MODEL@VERSION"
    )
    why: str = Field("", max_length=500, description="why; kept in the audit log")
    target: str = Field(
        description="what it means: MODEL, or MODEL@VERSION", json_schema_extra=POSITIONAL
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of a sentence")
