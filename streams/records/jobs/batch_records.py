"""Records of batches, as the bucket `batches` has them: what was asked for and how far it is.

Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from streams import messages
from streams.records.cas.cas_record import CasRecord
from streams.records.jobs.run_hours import RunHours

MAX_ERRORS = 100  # of an input file, told to the client


class BatchStatus(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True if nothing of the batch changes any more."""
        return self in (self.FAILED, self.COMPLETED, self.EXPIRED, self.CANCELLED)


@dataclass(frozen=True)
class BatchUsage:
    """Tokens of all lines that have ended, as billed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, usage: Mapping[str, Any]) -> Self:
        """Return the sums with a `usage` object of OpenAI's added."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens + usage.get("prompt_tokens", 0),
            cached_tokens=self.cached_tokens + messages.cached_tokens(usage),
            completion_tokens=self.completion_tokens + usage.get("completion_tokens", 0),
        )


@dataclass(frozen=True)
class Batch(CasRecord):
    """A batch of a tenant: one request for each line of its input file.

    `times` has the epoch second at which each status began, and `expires_at` is when the batch's
    time is over. `secret` makes the ids of its requests. `total` lines are in the input, of which
    `completed` have succeeded and `failed` have failed, as of the message `counted` of RESULTS. All
    lines before the index `watermark`, which begins at the byte `offset`, have a result. `tries`
    has, by its index, the number of the current try of each line that is not at its first, and how
    many of the earlier ones a worker had begun. `index_file` has where each line is, by its
    `custom_id`. A batch with `errors` that runs is about to fail. `key` is the API key that created
    it, as JSON without its secret. `paused` stops feeding, `not_before` delays it, and
    `run_hours` are when it may go on. `reserved_bytes` of RESULTS are promised to it, of which it
    has used `stored_bytes`. `retry_of` is the id of the batch whose failed lines it has.
    `event_due` is True from its last status on until the event of that is stored. `revision` is the
    sequence of the record in its stream.
    """

    tenant: str
    id: str
    endpoint: str
    input_file: str
    window_seconds: int
    created_at: int
    expires_at: int
    secret: bytes
    key: str = ""
    metadata: dict[str, str] | None = None
    output_expires_after_seconds: int | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    times: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    model: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: BatchUsage = BatchUsage()
    counted: int = 0
    watermark: int = 0
    offset: int = 0
    tries: dict[str, tuple[int, int]] = field(default_factory=dict)
    index_file: str = ""
    output_file: str = ""
    error_file: str = ""
    not_before: int = 0
    paused: bool = False
    run_hours: RunHours | None = None
    reserved_bytes: int = 0
    stored_bytes: int = 0
    retry_of: str = ""
    event_due: bool = False

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the record that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire: dict[str, Any] = messages.unpack(data)
        known, hours = messages.from_wire(cls, wire), wire.get("run_hours")
        return replace(
            known,
            status=BatchStatus(known.status),
            usage=messages.from_wire(BatchUsage, wire["usage"]),
            run_hours=messages.from_wire(RunHours, hours) if hours else None,
            tries={index: (tried, begun) for index, (tried, begun) in known.tries.items()},
            revision=revision,
        )

    @property
    def promised_bytes(self) -> int:
        """Bytes of RESULTS that the batch may still take; 0 when it has ended."""
        return 0 if self.status.is_final else max(0, self.reserved_bytes - self.stored_bytes)

    def may_run(self, now: float) -> bool:
        """Return True if lines may be published at an epoch second."""
        is_open = self.run_hours is None or self.run_hours.is_open(now)
        return is_open and not self.paused and self.not_before <= now

    def as_refused(self, code: str, message: str, now: int) -> Self:
        """Return the record of a batch that has failed as a whole, for one reason."""
        error = {"code": code, "message": message, "line": None, "param": None}
        return replace(self.at_status(BatchStatus.FAILED, now), errors=[error])

    @property
    def is_stopped(self) -> bool:
        """True if no further line may run: a client has cancelled the batch, or it is failing."""
        return self.status is BatchStatus.CANCELLING or bool(self.errors)

    @property
    def ran_late(self) -> bool:
        """True if the batch's time was over when its files were begun."""
        return self.times.get(BatchStatus.FINALIZING.value, 0) >= self.expires_at

    @property
    def is_over(self) -> bool:
        """True if no service has anything to do for it: it has ended, and its event is stored."""
        return self.status.is_final and not self.event_due

    def at_status(self, status: BatchStatus, now: int) -> Self:
        """Return the record with another status, which begins now."""
        times = {**self.times, status.value: now}
        return replace(self, status=status, times=times, event_due=status.is_final)
