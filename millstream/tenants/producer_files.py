"""Files of a producer: a tenant's NATS credentials, and programs that submit with them."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from streams.accounts.private_file import write_whole
from streams.errors import MillstreamError

_CONSTANT = re.compile(
    r'^(?P<begin>(?:const )?(?P<name>[A-Z]+) = )(?P<value>"[^"]*")', re.MULTILINE
)
_PROGRAMS = ("producer", "durable", "job")
EXAMPLES = (*(f"{name}.{kind}" for name in _PROGRAMS for kind in ("py", "mjs")), "package.json")


class ProducerFilesNotWritten(MillstreamError):
    """A directory for a producer's files cannot be used; the message names it and the reason."""


@dataclass(frozen=True)
class ProducerConnection:
    """Connection of a producer and its model, as the examples' first lines name them.

    `ca` is empty for a server without TLS; `model` is escaped, as in a subject.
    """

    url: str
    ca: str
    tenant: str
    model: str


def check_directory(directory: Path) -> Path:
    """Make a directory for a producer's files, if it is missing, and return it.

    Credentials are shown once, so that is done before they are issued. Raises
    `ProducerFilesNotWritten`.
    """
    directory = directory.expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(probe := directory / ".millstream", "")
        probe.unlink()
    except OSError as error:
        raise ProducerFilesNotWritten(
            f"cannot write into {directory} ({error.strerror}): name another directory"
        ) from error
    return directory


def write_files(
    directory: Path, connection: ProducerConnection, credentials: str
) -> Sequence[Path]:
    """Write the credentials, which their owner alone may read, and the examples; return the paths.

    Credentials of the same tenant are replaced. Raises `OSError`.
    """
    written = [directory / f"{connection.tenant}.creds"]
    write_whole(written[0], credentials)
    for name in EXAMPLES:
        source = (files("millstream") / "tenants/examples" / name).read_text()
        written.append(directory / name)
        written[-1].write_text(_filled_in(source, connection))
    return written


def _filled_in(source: str, connection: ProducerConnection) -> str:
    """The example with its own server, tenant and model; both languages write text as JSON does."""
    values = {name.upper(): json.dumps(value) for name, value in asdict(connection).items()}
    return _CONSTANT.sub(
        lambda found: f"{found['begin']}{values.get(found['name'], found['value'])}", source
    )
