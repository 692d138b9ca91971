"""The base of records that are changed by compare-and-set. Pure."""

from dataclasses import dataclass

from streams import messages


@dataclass(frozen=True, kw_only=True)
class CasRecord:
    """A record that knows the sequence under which it is stored: `revision`, 0 before it is."""

    revision: int = 0

    def pack(self) -> bytes:
        """Return the record as msgpack, without its revision."""
        return messages.pack({k: v for k, v in vars(self).items() if k != "revision"})
