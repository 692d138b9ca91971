"""Checks a registry record against the worker's destination policy, before anything follows it."""

from pathlib import Path
from typing import cast

from registry.destination_policy import DestinationPolicy, DestinationRefused
from registry.models import Model, Version
from streams.errors import MillstreamError


class ModelRefused(MillstreamError):
    """A registered model decides more than this worker's settings allow; the message names both.

    `setting` is the option that would allow it, empty if none does.
    """

    def __init__(self, model: str, reason: str, setting: str) -> None:
        super().__init__(f"the model {model!r} is refused: {reason}")
        self.model, self.setting = model, setting


def check_model(policy: DestinationPolicy, model: Model, version: Version) -> None:
    """Raise `ModelRefused` unless the policy allows all that a version's record decides.

    That is the server and the API key's variable of a remote model, and the directory with the
    files. Looks up where symbolic links lead, and reads no file.
    """
    name = f"{model.name}@{version.id}"
    try:
        if version.directory:
            check_directory(policy, Path(version.directory))
        if model.engine == "remote":
            policy.check_url(cast(str, version.options.get("url", "")))
            policy.check_key_variable(cast(str, version.options.get("api_key_variable", "")))
    except DestinationRefused as refused:
        raise ModelRefused(name, str(refused), refused.setting) from None
    except (ValueError, AttributeError, TypeError) as error:
        raise ModelRefused(name, f"its server is not valid: {error}", "") from None


def check_directory(policy: DestinationPolicy, directory: Path) -> None:
    """Raise `DestinationRefused` unless a directory, with symbolic links followed, is allowed."""
    policy.check_path(directory.resolve())
