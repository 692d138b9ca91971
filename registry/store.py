"""The registry: models and aliases in the KV bucket `registry`, as a live view to embed."""

from collections.abc import Callable, Mapping
from typing import Self

from registry.models import Alias, Model, Version
from registry.view import OPEN_SECONDS, View
from streams.connection import Broker
from streams.errors import MillstreamError, ModelNotFound
from streams.subjects import escape

BUCKET = "registry"
_MODEL, _ALIAS = "model.", "alias."


class NameTaken(MillstreamError):
    """An alias cannot have the name of a model."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} is a model's own name")
        self.name = name


class VersionExists(MillstreamError):
    """A version of this id is registered with other files; versions never change."""

    def __init__(self, model: str, version: str) -> None:
        super().__init__(
            f"version {version!r} of {model!r} exists with other files; name a new one"
        )
        self.model, self.version = model, version


class Registry:
    """Who can serve what. `models` is by name; `resolve` also knows aliases and pins."""

    def __init__(self, broker: Broker, replicas: int = 1) -> None:
        self._view = View[Model | Alias](broker, BUCKET, _decode, replicas)
        self._models: dict[str, Model] = {}
        self._aliases: dict[str, Alias] = {}
        self._view.on_change(self._sort)

    @classmethod
    async def open(
        cls, broker: Broker, *, replicas: int = 1, seconds: float = OPEN_SECONDS
    ) -> Self:
        """A registry with its contents loaded, current until `close`.

        Raises `BrokerUnavailable` if they have not come after `seconds`.
        """
        registry = cls(broker, replicas)
        await registry._view.open(seconds)
        return registry

    async def close(self) -> None:
        """Stop following changes. Idempotent."""
        await self._view.close()

    @property
    def models(self) -> Mapping[str, Model]:
        """All models by name, in order of name."""
        return self._models

    @property
    def aliases(self) -> Mapping[str, Alias]:
        """All aliases by their own name, in order of name."""
        return self._aliases

    def resolve(self, name: str) -> tuple[Model, Version]:
        """What a client means by `model`, `alias` or `model@version`.

        Raises `ModelNotFound` with the name as it came.
        """
        base, at, pin = name.partition("@")
        alias = None if base in self._models else self._aliases.get(base)
        model = self._models.get(alias.model if alias else base)
        if model is None:
            raise ModelNotFound(name)
        wanted = pin if at else (alias and alias.version) or model.default_version
        if wanted not in model.versions:
            raise ModelNotFound(name)
        return model, model.versions[wanted]

    def on_change(self, observer: Callable[[], None]) -> None:
        """Call `observer` after each change, on the event loop; it must neither block nor raise."""
        self._view.on_change(observer)

    async def until(self, holds: Callable[[], bool], seconds: float = OPEN_SECONDS) -> None:
        """Wait until `holds()`, asked again at each change, or raise `BrokerUnavailable`."""
        await self._view.until(holds, seconds)

    async def put(self, model: Model) -> None:
        """Add a model, or merge its versions into the registered one; the new fields win.

        Safe against others doing the same. Raises `VersionExists` for an id with other files.
        """
        await self._view.write(_MODEL + escape(model.name), lambda old: _merged(old, model))

    async def alias(self, name: str, model: str, version: str | None = None) -> None:
        """Let `name` mean a model, or one version of it; replaces what it meant before.

        Raises `NameTaken` for a model's own name, `ModelNotFound` for a target that is not there.
        """
        if name in self._models:
            raise NameTaken(name)
        self.resolve(f"{model}@{version}" if version else model)
        made = Alias(name=name, model=model, version=version).model_dump_json().encode()
        await self._view.write(_ALIAS + escape(name), lambda _: made)

    async def remove(self, name: str) -> None:
        """Forget a model with its aliases, or an alias. Idempotent."""
        names = [a for a, target in self._aliases.items() if target.model == name or a == name]
        for key in [_ALIAS + escape(a) for a in names] + [_MODEL + escape(name)]:
            await self._view.write(key, lambda _: None)

    def _sort(self) -> None:
        records = sorted(self._view.values.values(), key=lambda record: record.name)
        self._models = {r.name: r for r in records if isinstance(r, Model)}
        self._aliases = {r.name: r for r in records if isinstance(r, Alias)}


def _decode(key: str, value: bytes) -> Model | Alias:
    if key.startswith(_MODEL):
        return Model.model_validate_json(value)
    if key.startswith(_ALIAS):
        return Alias.model_validate_json(value)
    raise ValueError("neither a model nor an alias")


def _merged(old: Model | Alias | None, new: Model) -> bytes:
    if not isinstance(old, Model):
        return new.model_dump_json().encode()
    for version in new.versions.values():
        known = old.versions.get(version.id)
        if known and known.digest != version.digest:
            raise VersionExists(new.name, version.id)
    both = {"versions": {**old.versions, **new.versions}, "created": old.created}
    return new.model_copy(update=both).model_dump_json().encode()
