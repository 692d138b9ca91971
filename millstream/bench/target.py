"""What the gateway offers: the models to ask, their vocabulary and their context length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.bench.clients import Address, Clock, Unreachable
from millstream.bench.http import get_json
from millstream.bench.settings import BenchSettings
from millstream.up.home import KEY_FILE
from streams.errors import ModelNotFound


@dataclass(frozen=True)
class Model:
    """What a load needs to know of a model; None where the gateway does not say."""

    name: str
    vocabulary: int | None
    context: int | None


def address(settings: BenchSettings) -> Address:
    """Where to go, by default with the key that `millstream up` keeps in the data directory."""
    key = settings.api_key
    shown = key.get_secret_value() if key else _kept_key(settings.data_dir)
    return Address(settings.url.rstrip("/"), shown)


def _kept_key(data_dir: Path) -> str | None:
    file = data_dir.expanduser() / KEY_FILE
    return file.read_text().strip() if file.exists() else None


async def models(address: Address, names: tuple[str, ...], clock: Clock) -> list[Model]:
    """The named models, or the first that generates, of those with workers if any has.

    Raises `ModelNotFound`, or `Unreachable` with the gateway's own words.
    """
    status, body = await get_json(address, "/v1/models", clock)
    if status != 200:
        raise Unreachable(f"{address.url} answered {status}: {_message(body)}")
    offered = {entry["id"]: entry for entry in body["data"]}
    if names:
        return [_model(name, offered) for name in names]
    able = [name for name, entry in offered.items() if entry.get("task", "generate") == "generate"]
    if not able:
        raise Unreachable(f"{address.url} has no model that generates")
    served = (name for name in able if offered[name].get("workers", 1))
    return [_model(next(served, able[0]), offered)]


def _model(name: str, offered: dict[str, Any]) -> Model:
    """`NAME@VERSION` is described by its `NAME`."""
    entry = offered.get(name) or offered.get(name.partition("@")[0])
    if entry is None:
        raise ModelNotFound(name)
    return Model(name, entry.get("vocab_size"), entry.get("context_length"))


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(body)
