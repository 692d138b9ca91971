"""Bodies and ids of the files and uploads APIs, as the OpenAI SDK reads them. Pure."""

import re
from typing import Any

from api.schemas.files import MAX_EXPIRY_SECONDS, MAX_FILENAME, PURPOSES, ExpiresAfter
from streams.errors import BadRequest, NotFound
from streams.records.files.file_records import FileState, StoredFile

BATCH = "batch"
UPLOAD_SECONDS = 3600  # for which a file may be sent
_FILE, _UPLOAD, _PART = "file-", "upload_", "part_"
_ID = re.compile(r"[0-9a-f]{24}\Z")


def check_file(filename: str, purpose: str) -> None:
    """Raise `BadRequest` unless a file of this name may be stored for this purpose."""
    if not purpose:
        raise BadRequest("purpose is missing", "purpose")
    if purpose not in PURPOSES:
        known = ", ".join(PURPOSES)
        raise BadRequest(f"purpose is {purpose!r}, not one of: {known}", "purpose")
    if not 1 <= len(filename) <= MAX_FILENAME:
        raise BadRequest(
            f"the filename has {len(filename)} characters, not 1 to {MAX_FILENAME}", "file"
        )
    if purpose == BATCH and not filename.endswith(".jsonl"):
        raise BadRequest(f"the file {filename!r} for a batch is not named *.jsonl", "file")


def expiry_of(purpose: str, wanted: ExpiresAfter | None) -> int | None:
    """Return the seconds after which a file is removed; None: never.

    Files for batches are removed after 30 days unless they say something else.
    """
    if wanted:
        return wanted.seconds
    return MAX_EXPIRY_SECONDS if purpose == BATCH else None


def file_id(file: StoredFile) -> str:
    """Return the id by which clients know a file."""
    return f"{_FILE}{file.id}"


def upload_id(file: StoredFile) -> str:
    """Return the id by which clients know the upload of a file in parts."""
    return f"{_UPLOAD}{file.id}"


def part_id(part: str) -> str:
    """Return the id by which clients know a part of an upload."""
    return f"{_PART}{part}"


def parse_file_id(told: str) -> str:
    """Return the id of a file's record; raises `NotFound` for what is no file's id."""
    return _parse(_FILE, told, "file")


def parse_upload_id(told: str) -> str:
    """Return the id of an upload's record; raises `NotFound` for what is no upload's id."""
    return _parse(_UPLOAD, told, "upload")


def parse_part_id(told: str) -> str:
    """Return the id of a part in its file's record; raises `BadRequest` for what is none."""
    try:
        return _parse(_PART, told, "part")
    except NotFound as error:
        raise BadRequest(error.message, "part_ids") from None


def _parse(prefix: str, told: str, kind: str) -> str:
    bare = told.removeprefix(prefix)
    if bare == told or not _ID.match(bare):
        raise not_found(kind, told)
    return bare


def not_found(kind: str, told: str) -> NotFound:
    """Return the error for an id that names nothing of the tenant's: `kind` is file or upload."""
    return NotFound(f"there is no {kind} {told!r}")


def file_object(file: StoredFile) -> dict[str, Any]:
    """Return the `file` object of a file that is ready."""
    return {
        "id": file_id(file),
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "expires_at": file.expires_at,
    }


def upload_object(file: StoredFile) -> dict[str, Any]:
    """Return the `upload` object of a file that is, or was, sent in parts."""
    status = {
        FileState.PENDING: "pending",
        FileState.READY: "completed",
        FileState.DELETED: "cancelled",
    }
    return {
        "id": upload_id(file),
        "object": "upload",
        "bytes": file.size,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": status[file.state],
        "expires_at": file.created_at + UPLOAD_SECONDS,
        "file": file_object(file) if file.state is FileState.READY else None,
    }


def part_object(file: StoredFile, part: str, created_at: int) -> dict[str, Any]:
    """Return the `upload.part` object of a part that is stored."""
    return {
        "id": part_id(part),
        "object": "upload.part",
        "created_at": created_at,
        "upload_id": upload_id(file),
    }


def deleted_file(file: StoredFile) -> dict[str, Any]:
    """Return what is answered once a file is deleted."""
    return {"id": file_id(file), "object": "file", "deleted": True}
