"""What the gateway offers: the models to ask, their vocabulary and their context length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.bench.http_connection import get_json
from millstream.bench.load_client import Clock, GatewayAddress, Unreachable
from millstream.bench.settings import BenchSettings
from millstream.up.data_directory import API_KEY_FILE
from streams.errors import ModelNotFound


@dataclass(frozen=True)
class TargetModel:
    """What a load needs to know of a model; None where the gateway does not say."""

    name: str
    vocabulary: int | None
    context: int | None


def resolve_address(settings: BenchSettings) -> GatewayAddress:
    """Where to go, by default with the key that `millstream up` keeps in the data directory."""
    key = settings.api_key
    shown = key.get_secret_value() if key else _saved_key(settings.data_dir)
    return GatewayAddress(settings.url.rstrip("/"), shown)


def _saved_key(data_dir: Path) -> str | None:
    file = data_dir.expanduser() / API_KEY_FILE
    return file.read_text().strip() if file.exists() else None


async def fetch_models(
    address: GatewayAddress, names: tuple[str, ...], clock: Clock
) -> list[TargetModel]:
    """The named models, or the first that generates, of those with workers if any has.

    Raises `ModelNotFound`, or `Unreachable` with the gateway's own words.
    """
    status, body = await get_json(address, "/v1/models", clock)
    if status != 200:
        raise Unreachable(f"{address.url} answered {status}: {_error_message(body)}")
    offered = {entry["id"]: entry for entry in body["data"]}
    if names:
        return [_make_model(name, offered) for name in names]
    able = [name for name, entry in offered.items() if entry.get("task", "generate") == "generate"]
    if not able:
        raise Unreachable(f"{address.url} has no model that generates")
    served = (name for name in able if offered[name].get("workers", 1))
    return [_make_model(next(served, able[0]), offered)]


def _make_model(name: str, offered: dict[str, Any]) -> TargetModel:
    """`NAME@VERSION` is described by its `NAME`."""
    entry = offered.get(name) or offered.get(name.partition("@")[0])
    if entry is None:
        raise ModelNotFound(name)
    return TargetModel(name, entry.get("vocab_size"), entry.get("context_length"))


def _error_message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(body)
