"""Registry: models, adapters, aliases and served models in the KV bucket `registry`, live."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from registry.kv_records import KvRecords
from registry.kv_view import OPEN_SECONDS, Declares, never
from registry.models import (
    INHERITED_FIELDS,
    Adapter,
    Alias,
    AliasTarget,
    Model,
    ServedModels,
    Target,
    Version,
)
from streams.broker.broker_client import Broker
from streams.errors import MillstreamError, ModelNotFound, NotFound
from streams.subjects import escape

BUCKET = "registry"
_MODEL, _ALIAS, _ADAPTER, _SERVED = "model.", "alias.", "adapter.", "served."
MAX_SERVED = 64  # models of one record: each takes a worker's time to look after
_Record = Model | Alias | Adapter | ServedModels


class NameTaken(MillstreamError):
    """The name for a new alias or adapter already belongs to a model or an alias."""

    code = "name_taken"

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} is a model's own name")
        self.name = name


class TooManyServed(MillstreamError):
    """A worker or type has as many models to serve as it may have."""

    code = "invalid_request"

    def __init__(self, on: str) -> None:
        super().__init__(
            f"{on!r} has {MAX_SERVED} models to serve, the limit: end one with `models unserve`"
        )


class VersionExists(MillstreamError):
    """A version with this id is registered with other files; a version's files never change."""

    code = "version_exists"

    def __init__(self, model: str, version: str) -> None:
        super().__init__(
            f"version {version!r} of {model!r} exists with other files; name a new one"
        )
        self.model, self.version = model, version


class AliasMoved(MillstreamError):
    """An alias has another target than was expected, or no earlier one to go back to."""

    code = "alias_moved"


class Registry(KvRecords[_Record]):
    """All models, aliases, adapters and served models, kept current and looked up without waiting.

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
        self._served: dict[str, ServedModels] = {}
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

    @property
    def served(self) -> Mapping[str, ServedModels]:
        """The records of served models by worker id or type, in order of that."""
        return self._served

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

    async def set_alias(
        self, name: str, model: str, version: str | None = None, expected: str | None = None
    ) -> Alias:
        """Make `name` an alias of a model or of one of its versions, and return it.

        Moves an alias of this name, which then can go back. With `expected`, it must mean that now,
        such as `model@version`. Raises `NameTaken` if `name` is a model's own name, `ModelNotFound`
        if the model or version does not exist, and `AliasMoved` if it means something else.
        """
        if name in self._models:
            raise NameTaken(name)
        target = AliasTarget(model=model, version=version)
        if self._find(str(target)) is None:
            raise self.not_found(str(target))

        def move(old: _Record | None) -> Alias:
            alias = old if isinstance(old, Alias) else None
            current = str(alias.target) if alias else "nothing"
            if expected not in (None, current):
                raise AliasMoved(f"{name!r} means {current}, and not {expected}")
            return alias.moved(target) if alias else Alias(name=name, **target.model_dump())

        return await self._write_alias(name, move)

    async def move_alias_back(self, name: str) -> Alias:
        """Make an alias mean what it meant before its last move, and return it.

        Raises `ModelNotFound` if there is no such alias, or no longer what it meant, and
        `AliasMoved` if it has meant nothing else.
        """

        def move(old: _Record | None) -> Alias:
            if not isinstance(old, Alias):
                raise ModelNotFound(name)
            if not old.earlier:
                raise AliasMoved(f"{name!r} has meant nothing but {old.target}")
            self.resolve(str(old.earlier[-1]))
            return old.moved_back()

        return await self._write_alias(name, move)

    async def _write_alias(self, name: str, move: Callable[[_Record | None], Alias]) -> Alias:
        await self._view.write(
            _ALIAS + escape(name), lambda old: move(old).model_dump_json().encode()
        )
        return self._aliases[name]

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

    async def serve(self, on: str, model: str) -> ServedModels:
        """Have a model served by a worker or by all of a type, and return all that it has to serve.

        `model` may name an alias or a version. Idempotent, and safe against concurrent writers.
        Raises `ModelNotFound` if the model or version does not exist, and `TooManyServed`.
        """
        self.resolve(model)

        def add(old: _Record | None) -> bytes:
            models = old.models if isinstance(old, ServedModels) else ()
            if model not in models and len(models) >= MAX_SERVED:
                raise TooManyServed(on)
            added = tuple(dict.fromkeys((*models, model)))
            return ServedModels(on=on, models=added).model_dump_json().encode()

        await self._view.write(_SERVED + on, add)
        return self._served.get(on, ServedModels(on=on, models=()))

    async def stop_serving(self, on: str, model: str) -> ServedModels:
        """Have a model, named as for `serve`, served there no longer; return what still is.

        Raises `NotFound` if it is not in the record.
        """

        def drop(old: _Record | None) -> bytes | None:
            models = old.models if isinstance(old, ServedModels) else ()
            if model not in models:
                known = ", ".join(models) or "none"
                raise NotFound(f"{model!r} is not a model that {on!r} has to serve: {known}")
            left = tuple(each for each in models if each != model)
            return ServedModels(on=on, models=left).model_dump_json().encode() if left else None

        await self._view.write(_SERVED + on, drop)
        return self._served.get(on, ServedModels(on=on, models=()))

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
        self._served = {r.on: r for r in records if isinstance(r, ServedModels)}

    @staticmethod
    def _decode(key: str, value: bytes) -> _Record:
        if key.startswith(_MODEL):
            return Model.model_validate_json(value)
        if key.startswith(_ALIAS):
            return Alias.model_validate_json(value)
        if key.startswith(_ADAPTER):
            return Adapter.model_validate_json(value)
        if key.startswith(_SERVED):
            return ServedModels.model_validate_json(value)
        raise ValueError("neither a model, an alias, an adapter nor served models")


def _sort_key(record: _Record) -> str:
    if isinstance(record, ServedModels):
        return record.on
    return record.id if isinstance(record, Adapter) else record.name


def _adapter_key(adapter: Adapter) -> str:
    return f"{_ADAPTER}{escape(adapter.model)}.{adapter.name}"


def _merge(old: _Record | None, new: Model) -> bytes:
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
