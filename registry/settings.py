"""Settings of `millstream models add`, `models list` and `models show`."""

from pathlib import Path

from pydantic import Field, model_validator
from pydantic.config import JsonDict

from registry.models import Goals, Name, Task
from registry.remote import Api, Url
from streams.settings import ClientSettings
from streams.subjects import Priority, token

POSITIONAL: JsonDict = {"positional": True}


class AddSettings(ClientSettings):
    """What to register, and under which name."""

    path: Path | None = Field(
        None,
        description="directory with the model's files: safetensors or GGUF, JSON, tokeniser",
        json_schema_extra=POSITIONAL,
    )
    name: Name = Field(description="name that clients ask for")
    version: Name | None = Field(
        None, description="name of this version; by default the beginning of its digest"
    )
    alias: Name | None = Field(None, description="another name that shall mean this model")
    adapter_of: str | None = Field(
        None, description="the files are a LoRA adapter of this model: ask for it as MODEL:NAME"
    )
    remote: Url | None = Field(
        None,
        description="instead of PATH, the URL of a server that runs the model: up to and with /v1 "
        "for OpenAI's API, the whole of it for a single-item API",
    )
    remote_model: str | None = Field(
        None, description="what the server calls the model; by default the same name"
    )
    api: Api = Field("openai", description="what the server speaks")
    task: Task = Field("generate", description="what the remote model does")
    tokenizer: Path | None = Field(
        None, description="directory with the remote model's tokenizer.json; without: texts only"
    )
    context_length: int | None = Field(
        None, ge=1, description="tokens of the remote model's context; by default of config.json"
    )
    concurrency: int = Field(16, ge=1, description="most calls of a worker to the server at once")
    api_key_variable: str = Field(
        "", description="environment variable of the worker that holds the server's API key"
    )
    prompt_price: float | None = Field(
        None, ge=0, description="price of a million prompt tokens, for caps on spending"
    )
    completion_price: float | None = Field(
        None, ge=0, description="price of a million generated tokens"
    )
    interactive_goal_ms: float | None = Field(
        None, gt=0, description="longest time to first token that interactive requests should see"
    )
    standard_goal_ms: float | None = Field(None, gt=0, description="the same of standard requests")
    batch_goal_ms: float | None = Field(None, gt=0, description="the same of batch requests")
    first_seconds: float = Field(
        60, gt=0, description="time for the server's first token, or its whole answer"
    )
    chunk_seconds: float = Field(30, gt=0, description="time between the parts of a stream")

    @property
    def goals(self) -> dict[Priority, Goals]:
        """Those that are given."""
        wanted = {
            Priority.INTERACTIVE: self.interactive_goal_ms,
            Priority.STANDARD: self.standard_goal_ms,
            Priority.BATCH: self.batch_goal_ms,
        }
        return {of: Goals(time_to_first_token_ms=ms) for of, ms in wanted.items() if ms is not None}

    @model_validator(mode="after")
    def _has_one_source(self) -> "AddSettings":
        if (self.path is None) == (self.remote is None):
            raise ValueError("give either PATH or --remote")
        if self.adapter_of:
            self._check_adapter()
        return self

    def _check_adapter(self) -> None:
        if self.path is None or self.version or self.alias:
            raise ValueError("an adapter has a PATH, no --alias, and no --version but its digest")
        token(self.name)


class ListSettings(ClientSettings):
    """How to print the models."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class ShowSettings(ListSettings):
    """Which model to print."""

    name: str = Field(description="name of a registered model", json_schema_extra=POSITIONAL)
