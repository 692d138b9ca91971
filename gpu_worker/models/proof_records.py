"""Remembers which model versions this worker's engine has proven, across loads and restarts."""

import hashlib
import json
from pathlib import Path

import structlog

log = structlog.get_logger()


class ProofRecords:
    """Proofs by their key: the version's digest and the setting in which it was proven.

    They are kept in memory and, one small file each, in `directory` (None: in memory alone). Files
    that cannot be read count as missing, and one that cannot be written is only logged: the model
    is then proven again after the next start.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._known: set[str] = set()

    def is_proven(self, digest: str, setting: str) -> bool:
        """Return whether the version with this digest was proven in this setting.

        A version without a digest never is.
        """
        if not digest:
            return False
        key = _make_key(digest, setting)
        if key not in self._known and self._read(key):
            self._known.add(key)
        return key in self._known

    def add(self, digest: str, setting: str) -> None:
        """Remember that the version with this digest was proven in this setting."""
        if not digest:
            return
        key = _make_key(digest, setting)
        self._known.add(key)
        if self._directory is None:
            return
        path = self._path(self._directory, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"proven": key}))
        except OSError as error:
            log.info("proof_not_kept", path=str(path), reason=str(error))

    def _read(self, key: str) -> bool:
        if self._directory is None:
            return False
        try:
            return bool(json.loads(self._path(self._directory, key).read_text())["proven"] == key)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @staticmethod
    def _path(directory: Path, key: str) -> Path:
        return directory / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _make_key(digest: str, setting: str) -> str:
    return f"{digest}, {setting}"
