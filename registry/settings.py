"""Settings of `millstream models add`, `models list` and `models show`."""

from pathlib import Path

from pydantic import Field
from pydantic.config import JsonDict

from registry.models import Name
from streams.settings import ClientSettings

POSITIONAL: JsonDict = {"positional": True}


class AddSettings(ClientSettings):
    """What to register, and under which name."""

    path: Path = Field(
        description="directory with the model's files: safetensors or GGUF, JSON, tokeniser",
        json_schema_extra=POSITIONAL,
    )
    name: Name = Field(description="name that clients ask for")
    version: Name | None = Field(
        None, description="name of this version; by default the beginning of its digest"
    )
    alias: Name | None = Field(None, description="another name that shall mean this model")


class ListSettings(ClientSettings):
    """How to print the models."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class ShowSettings(ListSettings):
    """Which model to print."""

    name: str = Field(description="name of a registered model", json_schema_extra=POSITIONAL)
