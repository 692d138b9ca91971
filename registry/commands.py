"""`millstream models add`, `list` and `show`: what an operator sees and changes of the registry."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich import print_json
from rich.console import Console
from rich.table import Table

from registry.description import model_from
from registry.models import Model
from registry.remote import RemoteServer, remote_model
from registry.settings import AddSettings, ListSettings, ShowSettings
from registry.store import Registry
from streams.connection import connect

CONSOLE = Console(markup=False, highlight=False)  # names may look like markup


async def add(settings: AddSettings, stop: asyncio.Event) -> None:
    """Register a directory's files, or a server, as a model version and print what it became."""
    model = await asyncio.to_thread(_described, settings)
    async with opened(settings.nats) as registry:
        await registry.put(model)
        if settings.alias:
            await registry.alias(settings.alias, settings.name)
        CONSOLE.print(f"{model.name}@{model.default_version}: {_size(model)}")


def _described(settings: AddSettings) -> Model:
    if settings.path:
        return model_from(settings.path, settings.name, settings.version)
    assert settings.remote, "one of both is there"
    server = RemoteServer(
        url=settings.remote,
        model=settings.remote_model or settings.name,
        api=settings.api,
        concurrency=settings.concurrency,
        api_key_variable=settings.api_key_variable,
        first_seconds=settings.first_seconds,
        chunk_seconds=settings.chunk_seconds,
    )
    return remote_model(
        server,
        settings.name,
        task=settings.task,
        tokenizer=settings.tokenizer,
        context=settings.context_length,
        version=settings.version,
    )


async def list_models(settings: ListSettings, stop: asyncio.Event) -> None:
    """Print every model with its aliases."""
    async with opened(settings.nats) as registry:
        if settings.as_json:
            print_json(data=[_as_json(registry, model) for model in registry.models.values()])
        else:
            CONSOLE.print(_table(registry))


async def show(settings: ShowSettings, stop: asyncio.Event) -> None:
    """Print one model with its versions and files. Raises `ModelNotFound`."""
    async with opened(settings.nats) as registry:
        model, _ = registry.resolve(settings.name)
        if settings.as_json:
            print_json(data=_as_json(registry, model))
        else:
            CONSOLE.print(_facts(registry, model), _files(model))


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Registry]:
    """The registry of the NATS servers at `url`, for the time of one command."""
    async with connect(url, "millstream-models") as broker:
        registry = await Registry.open(broker)
        try:
            yield registry
        finally:
            await registry.close()


def _as_json(registry: Registry, model: Model) -> dict[str, object]:
    return {**model.model_dump(mode="json"), "aliases": _aliases(registry, model)}


def _aliases(registry: Registry, model: Model) -> list[str]:
    return [alias.name for alias in registry.aliases.values() if alias.model == model.name]


def _size(model: Model) -> str:
    return f"{model.engine}, {len(model.default.files)} files, context {model.context_length}"


def _table(registry: Registry) -> Table:
    table = Table("model", "aliases", "engine", "task", "context", "default version", "versions")
    for model in registry.models.values():
        table.add_row(
            model.name,
            ", ".join(_aliases(registry, model)),
            model.engine,
            model.task,
            str(model.context_length),
            model.default_version,
            str(len(model.versions)),
        )
    return table


def _facts(registry: Registry, model: Model) -> Table:
    table = Table(show_header=False)
    facts = model.model_dump(mode="json", exclude={"versions", "chat_template"})
    facts["aliases"] = ", ".join(_aliases(registry, model))
    facts["chat_template"] = "yes" if model.chat_template else "none: plain lines"
    for name, value in facts.items():
        if value not in (None, "", {}):
            table.add_row(name, str(value))
    return table


def _files(model: Model) -> Table:
    table = Table("version", "file", "sha256")
    for version in model.versions.values():
        table.add_row(
            version.id,
            version.directory or version.options.get("url") or "no files",
            version.digest,
            style="bold",
        )
        for path, sha256 in version.files.items():
            table.add_row("", path, sha256)
    return table
