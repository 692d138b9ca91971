"""Lines of jobs: how a request says which try of which line it is, and what its id is. Pure."""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Self

from streams import subjects

_ID_DIGITS = 31


@dataclass(frozen=True)
class ItemRef:
    """Which try of which line of a job a request is; `index` and `attempt` count from 0 and 1."""

    job: str
    index: int
    attempt: int
    is_last: bool

    def pack(self) -> str:
        """Return the reference as the value of a header."""
        return f"{self.job}.{self.index}.{self.attempt}.{int(self.is_last)}"

    @classmethod
    def unpack(cls, packed: str) -> Self:
        """Return the reference that `pack` encoded; raises ValueError for another text."""
        job, index, attempt, is_last = packed.split(".")
        return cls(subjects.token(job), int(index), int(attempt), is_last == "1")


def make_request_id(secret: bytes, index: int, attempt: int) -> str:
    """Return the id of the request that is a try of a line.

    Nobody without the job's secret can guess it, and it is the same whenever the job's owner
    repeats itself.
    """
    digest = hmac.digest(secret, f"{index}.{attempt}".encode(), hashlib.sha256).hex()
    return f"{subjects.ITEM_PREFIX}{digest[:_ID_DIGITS]}"
