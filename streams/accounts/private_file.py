"""Files that their owner alone may read."""

import os
from pathlib import Path


def write_new(path: Path, text: str) -> None:
    """Write a file that must not exist yet; raises FileExistsError, and never overwrites."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, text: str) -> None:
    """Write or replace a file; a reader finds the old text or the new one, never a part of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    write_new(partial, text)
    partial.replace(path)
