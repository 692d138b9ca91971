"""Looks the worker's configured models up in the registry, and waits for those that are missing."""

from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches

import structlog

from registry.models import Model, Version
from registry.store import Registry
from streams.errors import BrokerUnavailable, MillstreamError, ModelNotFound

log = structlog.get_logger()

# A registry without any model is one of a cell that is being made, or that lost its bucket, which
# gateways restore within half a minute. Among others, a missing model is likely a typo.
EMPTY_WAIT_SECONDS = 60.0
WAIT_SECONDS = 10.0
MOST_NAMES = 20  # shown in one message


class NotRegistered(MillstreamError):
    """Models that this worker shall serve are not registered; the message names those that are."""


async def wait_for_models(
    registry: Registry, names: Iterable[str]
) -> dict[str, tuple[Model, Version]]:
    """Return each named model and its version, by `MODEL@VERSION`, once all are registered.

    What is missing is logged at once, and waited for: 10 s, or 60 s if no model at all is
    registered. Raises `NotRegistered` after that.
    """
    wanted = tuple(names)

    def missing() -> list[str]:
        return [name for name in wanted if not _is_registered(registry, name)]

    seconds = WAIT_SECONDS if registry.models else EMPTY_WAIT_SECONDS
    for name in missing():
        reason = describe_missing(registry, name)
        log.warning("waiting_for_model", model=name, reason=reason, at_most_seconds=seconds)
    with suppress(BrokerUnavailable):  # not within the time
        await registry.wait_until(lambda: not missing(), seconds)
    if reasons := [describe_missing(registry, name) for name in missing()]:
        raise NotRegistered(
            f"{'; '.join(reasons)}. Register it with `millstream models add`, or name another one: "
            "--model"
        )
    found = map(registry.resolve, wanted)
    return {f"{model.name}@{version.id}": (model, version) for model, version in found}


def _is_registered(registry: Registry, name: str) -> bool:
    try:
        registry.resolve(name)
    except ModelNotFound:
        return False
    return True


def describe_missing(registry: Registry, name: str) -> str:
    """Return what the registry has instead of the model `name`, which `resolve` does not find."""
    with suppress(ModelNotFound):
        base = registry.resolve_target(name).model.name
        return f"{name!r} is an adapter, which the workers of its model {base!r} load themselves"
    base, at, version = name.partition("@")
    if at and _is_registered(registry, base):
        model, _ = registry.resolve(base)
        return f"the model {base!r} has no version {version!r}, it has {_list(model.versions)}"
    known = [*registry.models, *registry.aliases]
    near = get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"the registry has no model {name!r}{hint}, it has {_list(known)}"


def _list(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    rest = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
    return ", ".join(shown[:MOST_NAMES]) + rest or "none"
