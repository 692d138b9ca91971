"""Table of the accounts that own streams, as operators write it. Pure.

The table is a JSON object: `{"LEDGER": "A…", "INGRESS_*": "A…"}`. A name may end in `*`; the exact
name counts before a pattern, and the longer pattern before the shorter.
"""

import json
import re
from collections.abc import Iterable, Mapping

from streams.errors import MillstreamError

_PUBLIC_KEY = re.compile(r"A[A-Z2-7]{55}")  # of an account, as nkeys writes it


class OwnersUnusable(MillstreamError):
    """The table of streams and accounts is no such table, or has no account for some streams."""


def parse_owners(text: str) -> dict[str, str]:
    """Return the account's public key by stream name or pattern; raises `OwnersUnusable`."""
    try:
        table = json.loads(text)
    except ValueError as error:
        raise OwnersUnusable(f"the table of accounts is not JSON: {error}") from None
    if not isinstance(table, dict) or not table:
        raise OwnersUnusable('the table of accounts is no JSON object like {"LEDGER": "A…"}')
    for stream, account in table.items():
        if not (isinstance(account, str) and _PUBLIC_KEY.fullmatch(account)):
            raise OwnersUnusable(
                f"{stream}: {account!r} is not an account's public key (A and 55 letters or digits)"
            )
    return table


def assign_owners(streams: Iterable[str], owners: Mapping[str, str]) -> dict[str, str]:
    """Return the account of each stream; `owners` has accounts by stream name or pattern.

    Raises `OwnersUnusable` with the names of all streams that have none.
    """
    names = sorted(streams)
    found = {name: _find_owner(name, owners) for name in names}
    if without := [name for name, account in found.items() if account is None]:
        raise OwnersUnusable(
            f"the table names no account for {', '.join(without)}; nothing was changed"
        )
    return {name: account for name, account in found.items() if account is not None}


def _find_owner(stream: str, owners: Mapping[str, str]) -> str | None:
    if stream in owners:
        return owners[stream]
    patterns = [p for p in owners if p.endswith("*") and stream.startswith(p[:-1])]
    return owners[max(patterns, key=len)] if patterns else None
