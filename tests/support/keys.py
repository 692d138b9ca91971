"""Managed keys of a test: a pepper in a file, and the bucket `keys` as an operator changes it."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from registry.credentials.key_pepper import Pepper
from registry.credentials.key_records import ManagedKey
from registry.credentials.keys import Keys, make_key
from registry.tenant_records import ApiKey
from tests.support.accounts_server import connect
from tests.support.services import always

PEPPER = Pepper(b"a pepper of thirty-two bytes, now")


def pepper_file(folder: Path) -> Path:
    """The pepper's file."""
    file = folder / "key-pepper"
    file.write_bytes(PEPPER.secret)
    return file


class Operator:
    """Creates and changes managed keys."""

    def __init__(self, keys: Keys, now: float) -> None:
        self.keys, self.now = keys, now

    async def create(self, **rights: Any) -> tuple[str, ManagedKey]:
        """A key of the tenant `acme`, as its holder has it and as it is stored."""
        text, record = make_key(ApiKey(**{"tenant": "acme", **rights}), PEPPER, self.now)
        await self.keys.create(record)
        return str(text), record


@asynccontextmanager
async def operator(nats_url: str) -> AsyncIterator[Operator]:
    async with connect(nats_url, "operator") as broker:
        keys = await Keys.open(broker, declares=always)
        try:
            yield Operator(keys, time.time())
        finally:
            await keys.close()
