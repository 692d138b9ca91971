"""Registry: models, adapters and aliases in the KV bucket `registry`, as a live view."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from registry.kv_records import KvRecords
from registry.kv_view import OPEN_SECONDS, Declares, never
from registry.models import INHERITED_FIELDS, Adapter, Alias, Model, Version
from streams.broker.broker_client import Broker
from streams.errors import MillstreamError, ModelNotFound
from streams.subjects import escape

BUCKET = "registry"
_MODEL, _ALIAS, _ADAPTER = "model.", "alias.", "adapter."


class NameTaken(MillstreamError):
    """The name for a new alias or adapter already belongs to a model or an alias."""

    code = "name_taken"

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} is a model's own name")
        self.name = name


class VersionExists(MillstreamError):
    """A version with this id is registered with other files; a version's files never change."""

    code = "version_exists"

    def __init__(self, model: str, version: str) -> None:
        super().__init__(
            f"version {version!r} of {model!r} exists with other files; name a new one"
        )
        self.model, self.version = model, version


class Target(NamedTuple):
    """Model, version and adapter that a request asks for; `adapter` None: the plain model."""

    model: Model
    version: Version
    adapter: Adapter | None = None


class Registry(KvRecords[Model | Alias | Adapter]):
    """All registered models, aliases and adapters, kept current and looked up without waiting.

    `models` has the models by their own names; `resolve` also knows aliases and `model@version`.
    Methods that write also raise `BrokerUnavailable` if the broker does not answer, or
    `StoreRefused`.
    """

    bucket = BUCKET

    def __init__(self, broker: Broker, declares: Declares = never, replicas: int = 1) -> None:
        super().__init__(broker, declares, replicas)
        self._models: dict[str, Model] = {}
        self._aliases: dict[str, Alias] = {}
        self._adapters: dict[str, Adapter] = {}
        self._view.on_change(self._index_records)

    @property
    def models(self) -> Mapping[str, Model]:
        """All models by name, in order of name."""
        return self._models

    @property
    def aliases(self) -> Mapping[str, Alias]:
        """All aliases by their own names, in order of name."""
        return self._aliases

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """All adapters by the names that clients use (`model:name`), in order of name."""
        return self._adapters

    def resolve(self, name: str) -> tuple[Model, Version]:
        """Return the model and version meant by `model`, `alias` or either with `@version`.

        Without `@version`, the version is the one that the alias names, else the model's default. A
        model's own name wins over an equal alias. Raises `ModelNotFound` with `name` if there is no
        such model or version.
        """
        found = self._find(name)
        if found is None:
            raise ModelNotFound(name)
        return found

    def resolve_target(self, name: str) -> Target:
        """Return what a client asks for by a name as in `resolve`, or one followed by `:adapter`.

        A model's or alias's name wins over an adapter's. Raises `ModelNotFound` with `name` if
        there is no such model, version or adapter.
        """
        if found := self._find(name):
            return Target(*found)
        base, _, called = name.rpartition(":")
        found = self._find(base)
        adapter = self._adapters.get(f"{found[0].name}:{called}") if found else None
        if found is None or adapter is None:
            raise ModelNotFound(name)
        return Target(*found, adapter)

    def _find(self, name: str) -> tuple[Model, Version] | None:
        base, at, pin = name.partition("@")
        alias = None if base in self._models else self._aliases.get(base)
        model = self._models.get(alias.model if alias else base)
        if model is None:
            return None
        version = model.versions.get(
            pin if at else (alias and alias.version) or model.default_version
        )
        return (model, version) if version else None

    def knows(self, name: str) -> bool:
        """Return True if a request may ask for `name`."""
        try:
            self.resolve_target(name)
        except ModelNotFound:
            return False
        return True

    def not_found(self, name: str, remedy: str = "") -> ModelNotFound:
        """Return the error for a name that means nothing, with names near to it, for operators.

        Clients are not told of names, which may be others'.
        """
        pinned = (
            f"{model.name}@{each}" for model in self._models.values() for each in model.versions
        )
        known = [*self._models, *self._aliases, *self._adapters]
        near = get_close_matches(name, [*pinned, *known] if "@" in name else known)
        return ModelNotFound(name, near, remedy)

    async def wait_until(
        self, condition: Callable[[], bool], seconds: float = OPEN_SECONDS
    ) -> None:
        """Wait until `condition()` returns True; it is called at once and after each change.

        Raises `BrokerUnavailable` after `seconds`.
        """
        await self._view.wait_until(condition, seconds)

    async def add_model(self, model: Model) -> None:
        """Add a model, or merge it into the registered model of the same name.

        When merging, the fields of `model` win. The registered versions, goals and creation time
        stay, as do those of `INHERITED_FIELDS` that `model` does not set. Safe against concurrent
        writers. Raises `VersionExists` if a version's id is registered with other files.
        """
        await self._view.write(_MODEL + escape(model.name), lambda old: _merge(old, model))

    async def set_alias(self, name: str, model: str, version: str | None = None) -> None:
        """Make `name` an alias of a model or of one of its versions.

        Replaces an alias of this name. Raises `NameTaken` if `name` is a model's own name,
        `ModelNotFound` if the model or version does not exist.
        """
        if name in self._models:
            raise NameTaken(name)
        target = f"{model}@{version}" if version else model
        if self._find(target) is None:
            raise self.not_found(target)
        made = Alias(name=name, model=model, version=version).model_dump_json().encode()
        await self._view.write(_ALIAS + escape(name), lambda _: made)

    async def add_adapter(self, adapter: Adapter) -> None:
        """Add an adapter, or replace the one of the same model and name.

        Running requests keep the old files. Raises `ModelNotFound` if its model does not exist,
        `NameTaken` if `model:name` is the name of a model or an alias.
        """
        if self._find(adapter.model) is None:
            raise self.not_found(adapter.model)
        if adapter.id in self._models or adapter.id in self._aliases:
            raise NameTaken(adapter.id)
        made = adapter.model_dump_json().encode()
        await self._view.write(_adapter_key(adapter), lambda _: made)

    async def remove(self, name: str) -> None:
        """Remove a model with its aliases and adapters, or an alias, or an adapter, by name.

        An adapter's name is `model:name`. An unknown name is ignored.
        """
        aliases = [a for a, target in self._aliases.items() if name in (target.model, a)]
        adapters = [a for a in self._adapters.values() if name in (a.model, a.id)]
        keys = [_ALIAS + escape(a) for a in aliases] + [_adapter_key(a) for a in adapters]
        if name in self._models:
            keys.append(_MODEL + escape(name))
        for key in keys:
            await self._view.write(key, lambda _: None)

    def _index_records(self) -> None:
        records = sorted(self._view.values.values(), key=_sort_key)
        self._models = {r.name: r for r in records if isinstance(r, Model)}
        self._aliases = {r.name: r for r in records if isinstance(r, Alias)}
        self._adapters = {r.id: r for r in records if isinstance(r, Adapter)}

    @staticmethod
    def _decode(key: str, value: bytes) -> Model | Alias | Adapter:
        if key.startswith(_MODEL):
            return Model.model_validate_json(value)
        if key.startswith(_ALIAS):
            return Alias.model_validate_json(value)
        if key.startswith(_ADAPTER):
            return Adapter.model_validate_json(value)
        raise ValueError("neither a model, an alias nor an adapter")


def _sort_key(record: Model | Alias | Adapter) -> str:
    return record.id if isinstance(record, Adapter) else record.name


def _adapter_key(adapter: Adapter) -> str:
    return f"{_ADAPTER}{escape(adapter.model)}.{adapter.name}"


def _merge(old: Model | Alias | Adapter | None, new: Model) -> bytes:
    if not isinstance(old, Model):
        return new.model_dump_json().encode()
    for version in new.versions.values():
        known = old.versions.get(version.id)
        if known and known.digest != version.digest:
            raise VersionExists(new.name, version.id)
    merged = {
        "versions": {**old.versions, **new.versions},
        "goals": {**old.goals, **new.goals},
        "created": old.created,
    }
    kept = {
        name: getattr(old, name) for name in INHERITED_FIELDS if name not in new.model_fields_set
    }
    return new.model_copy(update=merged | kept).model_dump_json().encode()
