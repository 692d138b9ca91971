"""The commands `millstream models add`, `list`, `show` and `remove`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich import print_json
from rich.table import Table

from millstream.admin.console_output import make_console, make_whole_table
from millstream.admin.fitted_table import Column, FittedTable
from millstream.models.settings import AddSettings, ListSettings, RemoveSettings, ShowSettings
from registry.artifact_verification import SHORT_DIGEST
from registry.lora_inspection import adapter_from
from registry.model_inspection import make_record, require_servable
from registry.models import INHERITED_FIELDS, Adapter, Model
from registry.remote_models import RemoteServer, find_needed_settings, remote_model
from registry.store import NameTaken, Registry
from streams.broker.broker_client import connect
from streams.connection_files import NO_FILES, ConnectionFiles
from streams.errors import ModelNotFound

_COLUMNS = (
    Column("model", "name", least=12),
    Column("aliases", "text", least=12),
    Column("engine", "text", least=12),
    Column("task"),
    Column("context", is_number=True),
    Column("default\nversion", "name"),
    Column("versions", is_number=True, rank=1),
)


async def add(settings: AddSettings, stop: asyncio.Event) -> None:
    """Register a model version (from files or from a server's URL) or a LoRA adapter (from files).

    Prints the registered name. Raises `ArtifactRefused` if the files cannot be served,
    `RemoteRefused` if the options do not fit a remote server, `VersionExists` if the version's name
    is registered with other files, `NameTaken` if the alias or the adapter has a name that is in
    use, `ModelNotFound` if an adapter's base model is not registered, and `BrokerUnavailable` if
    NATS does not answer.
    """
    if settings.adapter_of:
        await _add_adapter(settings, settings.adapter_of)
    else:
        await _add_model(settings)


async def _add_model(settings: AddSettings) -> None:
    described, warnings = await asyncio.to_thread(_make_model, settings)
    options = {name: getattr(settings, name) for name in INHERITED_FIELDS}
    given = {name: value for name, value in options.items() if value is not None}
    model = described.model_copy(update={**given, "goals": settings.goals})
    async with open_registry(settings.nats, settings.nats_files) as registry:
        if settings.alias in {*registry.models, settings.name}:  # before anything is registered
            raise NameTaken(settings.alias)
        await registry.add_model(model)
        if settings.alias:
            await registry.set_alias(settings.alias, settings.name)
        console = make_console()
        for warning in warnings:
            console.print(f"warning: {warning}")
        console.print(f"{model.name}@{model.default_version}: {_summary(model)}")


def _make_model(settings: AddSettings) -> tuple[Model, list[str]]:
    """Return the record of what is to be registered, and warnings about files or server."""
    if settings.path:
        warnings = [f"{each.path}: {each.reason}" for each in require_servable(settings.path)]
        return make_record(settings.path, settings.name, settings.version), warnings
    assert settings.remote, "the settings require a path or a server"
    server = RemoteServer(
        url=settings.remote,
        model=settings.remote_model or settings.name,
        api=settings.api,
        concurrency=settings.concurrency,
        api_key_variable=settings.api_key_variable,
        first_seconds=settings.first_seconds,
        chunk_seconds=settings.chunk_seconds,
    )
    model = remote_model(
        server,
        settings.name,
        task=settings.task,
        tokenizer=settings.tokenizer,
        context=settings.context_length,
        version=settings.version,
    )
    return model, [f"at the worker's start: {need}" for need in find_needed_settings(server)]


async def _add_adapter(settings: AddSettings, base: str) -> None:
    assert settings.path, "an adapter has files"
    async with open_registry(settings.nats, settings.nats_files) as registry:
        adapter = await asyncio.to_thread(
            adapter_from, settings.path, settings.name, *registry.resolve(base)
        )
        await registry.add_adapter(adapter)
        make_console().print(
            f"{adapter.id}: {_adapter_kind(adapter)} on {', '.join(adapter.targets)}"
        )


async def list_models(settings: ListSettings, stop: asyncio.Event) -> None:
    """Print every registered model with its aliases and adapters, as a table or as a JSON list.

    Raises `BrokerUnavailable` if NATS does not answer.
    """
    async with open_registry(settings.nats, settings.nats_files) as registry:
        if settings.as_json:
            print_json(data=[_model_json(registry, model) for model in registry.models.values()])
        else:
            make_console().print(_table(registry))


async def show(settings: ShowSettings, stop: asyncio.Event) -> None:
    """Print the model that `settings.name` names, with its versions and files, as tables or JSON.

    The name may also be an alias, which shows its model, or `MODEL:ADAPTER`, which shows that
    adapter with its files. Raises `ModelNotFound` if nothing has this name.
    """
    async with open_registry(settings.nats, settings.nats_files) as registry:
        model, _, adapter = registry.resolve_target(settings.name)
        if settings.as_json:
            print_json(data=_adapter_json(adapter) if adapter else _model_json(registry, model))
        elif adapter:
            make_console().print(_adapter_facts(adapter), _adapter_files(adapter))
        else:
            make_console().print(_facts(registry, model), _files(model))


async def remove(settings: RemoveSettings, stop: asyncio.Event) -> None:
    """Remove a model with its aliases and adapters, or one alias or adapter, from the registry.

    The files on disk are not deleted. Queued requests of a removed model end with the error
    `model_not_found`. Raises `ModelNotFound`, and removes nothing, if no model, alias or adapter
    has the name in the settings.
    """
    async with open_registry(settings.nats, settings.nats_files) as registry:
        if settings.name not in {*registry.models, *registry.aliases, *registry.adapters}:
            raise ModelNotFound(settings.name)
        await registry.remove(settings.name)
        make_console().print(f"{settings.name}: removed")


@asynccontextmanager
async def open_registry(url: str, files: ConnectionFiles = NO_FILES) -> AsyncIterator[Registry]:
    """Connect to NATS at `url`, by `files`, and yield the registry of models with its contents.

    Leaving the `with` block closes the registry and the connection. Raises `BrokerUnavailable` if
    NATS does not answer.
    """
    async with connect(url, "millstream-models", files) as broker:
        registry = await Registry.open(broker)
        try:
            yield registry
        finally:
            await registry.close()


def _model_json(registry: Registry, model: Model) -> dict[str, object]:
    adapters = [_adapter_json(adapter) for adapter in _adapters(registry, model)]
    aliases = _aliases(registry, model)
    return {**model.model_dump(mode="json"), "aliases": aliases, "adapters": adapters}


def _adapter_json(adapter: Adapter) -> dict[str, object]:
    return adapter.model_dump(mode="json")


def _adapters(registry: Registry, model: Model) -> list[Adapter]:
    return [adapter for adapter in registry.adapters.values() if adapter.model == model.name]


def _adapter_kind(adapter: Adapter) -> str:
    return f"LoRA, rank {adapter.rank}"


def _aliases(registry: Registry, model: Model) -> list[str]:
    return [alias.name for alias in registry.aliases.values() if alias.model == model.name]


def _summary(model: Model) -> str:
    return f"{model.engine}, {len(model.default.files)} files, context {model.context_length}"


def _table(registry: Registry) -> FittedTable:
    rows: list[tuple[str, ...]] = []
    for model in registry.models.values():
        rows.append(
            (
                model.name,
                ", ".join(_aliases(registry, model)),
                model.engine,
                model.task,
                str(model.context_length),
                model.default_version,
                str(len(model.versions)),
            )
        )
        for adapter in _adapters(registry, model):
            short = adapter.digest[:SHORT_DIGEST]
            rows.append((adapter.id, "", _adapter_kind(adapter), model.task, "", short, ""))
    return FittedTable(_COLUMNS, rows)


def _facts(registry: Registry, model: Model) -> Table:
    table = make_whole_table()
    facts = model.model_dump(mode="json", exclude={"versions", "chat_template"})
    facts["aliases"] = ", ".join(_aliases(registry, model))
    facts["adapters"] = ", ".join(adapter.name for adapter in _adapters(registry, model))
    facts["chat_template"] = "yes" if model.chat_template else "none: plain lines"
    for name, value in facts.items():
        if value not in (None, "", {}):
            table.add_row(name, str(value))
    return table


def _adapter_facts(adapter: Adapter) -> Table:
    table = make_whole_table()
    for name, value in _adapter_json(adapter).items():
        if name not in ("files", "directory", "digest"):
            table.add_row(name, str(value))
    return table


def _adapter_files(adapter: Adapter) -> Table:
    table = make_whole_table("file", "sha256")
    table.add_row(adapter.directory, adapter.digest, style="bold")
    for path, sha256 in adapter.files.items():
        table.add_row(path, sha256)
    return table


def _files(model: Model) -> Table:
    table = make_whole_table("version", "file", "sha256")
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
