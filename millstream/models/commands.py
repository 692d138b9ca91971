"""The commands `millstream models add`, `list`, `show` and `remove`, and those of aliases.

All ask the admin service. `models add` reads the files itself, where they lie, and sends a record.
"""

import asyncio

from rich import print_json
from rich.table import Table

from millstream.admin.admin_client import (
    AdminClient,
    JsonBody,
    admin_client,
    list_all,
    put_model,
)
from millstream.admin.console_output import make_console, make_whole_table, print_json_lines
from millstream.admin.fitted_table import Column, FittedTable
from millstream.models.settings import (
    AddSettings,
    AliasBackSettings,
    AliasSettings,
    ListSettings,
    RemoveSettings,
    ShowSettings,
)
from registry.artifact_verification import SHORT_DIGEST
from registry.lora_inspection import adapter_from
from registry.model_inspection import make_record, require_servable
from registry.models import INHERITED_FIELDS, Adapter, Alias, Model
from registry.price_records import per_million
from registry.remote_models import RemoteServer, find_needed_settings, remote_model

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
    `RemoteRefused` if the options do not fit a remote server, and as `AdminClient.call`: also if
    the version's name is registered with other files, if the alias or the adapter has a name that
    is in use, and if an adapter's base model is not registered.
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
    async with admin_client(settings) as admin:
        await put_model(admin, model, settings.alias, settings.why)
        if "prompt_price" in given or "completion_price" in given:
            found = await admin.call("models.show", name=model.name)
            await _enter_price(admin, Model.model_validate(found["model"]))
    console = make_console()
    for warning in warnings:
        console.print(f"warning: {warning}")
    console.print(f"{model.name}@{model.default_version}: {_summary(model)}")


async def _enter_price(admin: AdminClient, model: Model) -> None:
    """Enter the price in a model's record into the price book; a cached token's price stays."""
    current = await list_all(admin, "prices.list", by="version", model=model.name)
    await admin.call(
        "prices.set",
        name=model.name,
        prompt=per_million(model.price.prompt),
        completion=per_million(model.price.completion),
        cached=current[0]["cached"] if current else None,
    )


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
        group_items=settings.group_items,
        group_seconds=settings.group_seconds,
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
    async with admin_client(settings) as admin:
        found = await admin.call("models.show", name=base)
        model = Model.model_validate(found["model"])
        version = model.versions[found["version"]]
        adapter = await asyncio.to_thread(
            adapter_from, settings.path, settings.name, model, version
        )
        record = adapter.model_dump(mode="json")
        await admin.call("adapters.put", name=adapter.id, adapter=record)
    make_console().print(f"{adapter.id}: {_adapter_kind(adapter)} on {', '.join(adapter.targets)}")


async def list_models(settings: ListSettings, stop: asyncio.Event) -> None:
    """Print every registered model with its aliases and adapters, as a table or as a JSON list.

    Raises as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        models = await list_all(admin, "models.list")
    if settings.as_json:
        print_json(data=models)
    else:
        make_console().print(_table(models))


async def show(settings: ShowSettings, stop: asyncio.Event) -> None:
    """Print the model that `settings.name` names, with its versions and files, as tables or JSON.

    The name may also be an alias, which shows its model, or `MODEL:ADAPTER`, which shows that
    adapter with its files. Raises as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        found = await admin.call("models.show", name=settings.name)
    if settings.as_json:
        print_json(data=found["adapter"] or found["model"])
    elif found["adapter"]:
        adapter = Adapter.model_validate(found["adapter"])
        make_console().print(_adapter_facts(found["adapter"]), _adapter_files(adapter))
    else:
        make_console().print(_facts(found["model"]), _files(Model.model_validate(found["model"])))


async def remove(settings: RemoveSettings, stop: asyncio.Event) -> None:
    """Remove a model with its aliases and adapters, or one alias or adapter, from the registry.

    The files on disk are not deleted. Queued requests of a removed model end with the error
    `model_not_found`. Raises as `AdminClient.call`, and removes nothing, if no model, alias or
    adapter has the name in the settings.
    """
    async with admin_client(settings) as admin:
        await admin.call("models.remove", name=settings.name)
    make_console().print(f"{settings.name}: removed")


async def set_alias(settings: AliasSettings, stop: asyncio.Event) -> None:
    """Make a name mean a model or one of its versions, in place of what it meant before.

    Raises as `AdminClient.call`.
    """
    model, _, version = settings.target.partition("@")
    async with admin_client(settings) as admin:
        alias = await admin.call(
            "aliases.put",
            name=settings.name,
            model=model,
            version=version or None,
            expected=settings.expected,
            why=settings.why,
        )
    if settings.as_json:
        print_json(data=alias)
    else:
        make_console().print(f"{settings.name}: {settings.target}")


async def move_alias_back(settings: AliasBackSettings, stop: asyncio.Event) -> None:
    """Make an alias mean what it meant before its last move.

    Raises as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        alias = await admin.call("aliases.back", name=settings.name, why=settings.why)
    if settings.as_json:
        print_json(data=alias)
    else:
        make_console().print(f"{settings.name}: {Alias.model_validate(alias).target}")


async def list_aliases(settings: ListSettings, stop: asyncio.Event) -> None:
    """Print every alias and what it means, as a table or as JSON with an object in each line.

    Raises as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        aliases = await list_all(admin, "aliases.list")
    if settings.as_json:
        print_json_lines(aliases)
        return
    table = make_whole_table("alias", "model", "version")
    for alias in aliases:
        table.add_row(alias["name"], alias["model"], alias["version"] or "")
    make_console().print(table)


def _adapter_kind(adapter: Adapter) -> str:
    return f"LoRA, rank {adapter.rank}"


def _summary(model: Model) -> str:
    return (
        f"{model.engine}, {len(model.default.files)} files, context {model.default.context_length}"
    )


def _table(models: list[JsonBody]) -> FittedTable:
    rows: list[tuple[str, ...]] = []
    for model in models:
        rows.append(
            (
                model["name"],
                ", ".join(model["aliases"]),
                model["engine"],
                model["task"],
                str(model["context_length"]),
                model["default_version"],
                str(len(model["versions"])),
            )
        )
        for adapter in map(Adapter.model_validate, model["adapters"]):
            short = adapter.digest[:SHORT_DIGEST]
            row = (adapter.id, "", _adapter_kind(adapter), model["task"], "", short, "")
            rows.append(row)
    return FittedTable(_COLUMNS, rows)


def _facts(model: JsonBody) -> Table:
    table = make_whole_table()
    facts = {name: value for name, value in model.items() if name != "versions"}
    facts["aliases"] = ", ".join(model["aliases"])
    facts["adapters"] = ", ".join(adapter["name"] for adapter in model["adapters"])
    facts["chat_template"] = "yes" if model["chat_template"] else "none: plain lines"
    for name, value in facts.items():
        if value not in (None, "", {}):
            table.add_row(name, str(value))
    return table


def _adapter_facts(adapter: JsonBody) -> Table:
    table = make_whole_table()
    for name, value in adapter.items():
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
