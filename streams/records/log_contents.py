"""Contents of a token log, and the end of its request. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streams import messages
from streams.messages import Record


@dataclass(frozen=True)
class RequestEnd:
    """End of a request, as its token log or the copy stored beside it tells it.

    `attempts` counts the claims of the log, and `version` is that of the last one; 0 and empty if
    no worker had it. `first_output_at` is when the first output came, in epoch milliseconds; 0 if
    none did, or if that is not known.
    """

    terminal: Mapping[str, Any]
    version: str = ""
    attempts: int = 0
    first_output_at: int = 0


@dataclass(frozen=True)
class LogContents:
    """All records of one token log in order, decoded.

    `last` is the stream sequence of the last record, 0 for an empty log.
    """

    records: list[Record] = field(default_factory=list)
    last: int = 0

    @property
    def attempts(self) -> int:
        """Number of the latest attempt that has claimed the log, counted from 1; 0 if none has."""
        return max((r["attempt"] for r in self.records if r["type"] == "started"), default=0)

    @property
    def terminal(self) -> Record | None:
        """The record that ended the request (`done` or `error`); None while there is none."""
        last = self.records[-1] if self.records else None
        return last if last and last["type"] in messages.TERMINAL_TYPES else None

    @property
    def tokens(self) -> list[int]:
        """The ids of all generated tokens in the log, from all attempts, in order."""
        return [token for part in self._output for token in part.get("tokens", ())]

    @property
    def text(self) -> str:
        """The text of all generated tokens in the log, from all attempts."""
        return "".join(part.get("text", "") for part in self._output)

    @property
    def rows(self) -> int:
        """The number of result rows in the log: vectors of an `embed` or `classify` request."""
        return sum(part["count"] for part in self._output if part["type"] == "result")

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated so far, with those whose records the broker has dropped."""
        last = next((part for part in reversed(self._output) if part["type"] == "chunk"), None)
        return last["index"] + last["count"] if last else 0

    @property
    def first_output_at(self) -> int:
        """The time of the first output by any attempt, in epoch ms; 0: none, or not known."""
        claims = (r.get("first_output_at", 0) for r in self.records if r["type"] == "started")
        outputs = (part.get("at", 0) for part in self._output[:1])
        return next((at for at in (*claims, *outputs) if at), 0)

    @property
    def has_output(self) -> bool:
        """True if an attempt has stored any output, though the broker may have dropped it."""
        return bool(self._output)

    @property
    def is_truncated(self) -> bool:
        """True if the broker has dropped the log's beginning; no attempt can continue it then."""
        ends = [0, *(part["index"] + part["count"] for part in self._output)]
        parts = zip(self._output, ends, strict=False)
        return any(part["index"] != end for part, end in parts)

    @property
    def end(self) -> RequestEnd | None:
        """End of the request; None while the log has no terminal."""
        return self.ended_by(self.terminal) if self.terminal else None

    def ended_by(self, terminal: Mapping[str, Any]) -> RequestEnd:
        """Return the end of a request with this log, if `terminal` is its last record."""
        claims = [record["version"] for record in self.records if record["type"] == "started"]
        version = claims[-1] if claims else ""
        return RequestEnd(terminal, version, self.attempts, self.first_output_at)

    @property
    def _output(self) -> list[Record]:
        return [record for record in self.records if record["type"] in ("chunk", "result")]
