"""Finds the gateway to load and its models, with their vocabulary and context length."""

import ssl
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from millstream.bench.http_connection import get_json
from millstream.bench.load_client import (
    Clock,
    GatewayAddress,
    KeyRefused,
    Unreachable,
)
from millstream.bench.settings import BenchSettings
from streams.errors import MillstreamError, ModelNotFound


class TlsFileUnusable(MillstreamError):
    """A file of certificates that was given with `--ca` or `--client-cert` cannot be used."""

    def __init__(self, option: str, file: Path | None, error: OSError) -> None:
        reason = "it has no certificate, or no key for it, in PEM"
        if not isinstance(error, ssl.SSLError):
            reason = error.strerror or str(error)
        super().__init__(f"--{option} {file}: {reason}")


@dataclass(frozen=True)
class TargetModel:
    """A model to which a load is sent, as the gateway's `/v1/models` describes it.

    `vocabulary` is its number of token ids and `context` its context length in tokens; each is None
    if the gateway does not say.
    """

    name: str
    vocabulary: int | None
    context: int | None


def resolve_address(settings: BenchSettings) -> GatewayAddress:
    """Return the gateway's URL and API key from the settings; None as key: none is sent.

    Whether the gateway answers is not checked. Raises `TlsFileUnusable` for a file of certificates
    that cannot be used.
    """
    key = settings.api_key
    return GatewayAddress(
        settings.url.rstrip("/"), key.get_secret_value() if key else None, _load_trust(settings)
    )


def _load_trust(settings: BenchSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca)
    except OSError as error:
        raise TlsFileUnusable("ca", settings.ca, error) from None
    if settings.client_cert:
        try:
            context.load_cert_chain(settings.client_cert)
        except OSError as error:
            raise TlsFileUnusable("client-cert", settings.client_cert, error) from None
    return context


async def fetch_models(
    address: GatewayAddress, names: tuple[str, ...], clock: Clock
) -> list[TargetModel]:
    """Ask the gateway for its models and return those named in `names`, in that order.

    If `names` is empty, the list has one model that generates text: the first one that has workers,
    else the first. Raises `ModelNotFound` for a name that the gateway does not offer, and
    `KeyRefused` for a wrong API key. Raises `Unreachable` if the gateway cannot be reached or
    answers with another error, whose message is included, or if `names` is empty and no model
    generates text.
    """
    status, body = await get_json(address, "/v1/models", clock)
    if status == HTTPStatus.UNAUTHORIZED:
        raise KeyRefused(address)
    if status != 200:
        raise Unreachable(f"{address.url} answered {status}: {_error_message(body)}")
    offered = {entry["id"]: entry for entry in body["data"]}
    if names:
        return [_make_model(name, offered) for name in names]
    generating = [
        name for name, entry in offered.items() if entry.get("task", "generate") == "generate"
    ]
    if not generating:
        raise Unreachable(f"{address.url} has no model that generates")
    served = (name for name in generating if offered[name].get("workers", 1))
    return [_make_model(next(served, generating[0]), offered)]


def _make_model(name: str, offered: dict[str, Any]) -> TargetModel:
    """The offered model of this name; `NAME@VERSION` may be listed by `NAME` alone."""
    entry = offered.get(name) or offered.get(name.partition("@")[0])
    if entry is None:
        raise ModelNotFound(name)
    return TargetModel(name, entry.get("vocab_size"), entry.get("context_length"))


def _error_message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(body)
