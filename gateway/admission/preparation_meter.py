"""Prepares submissions for their queue, and measures how long that takes this gateway."""

import time

from api.submission.submission_record import Submission
from api.submission.validation import SubmissionValidator, ValidatedRequest
from registry.tenant_records import Tenant


class PreparationMeter:
    """Validates submissions that are to be queued, and keeps count of them.

    `requests` is how many there were, refused ones included, and `seconds` how long they took
    together, waiting for a thread included.
    """

    def __init__(self, validator: SubmissionValidator) -> None:
        self._validator = validator
        self.requests, self.seconds = 0, 0.0

    async def validate(self, tenant: Tenant, submission: Submission) -> list[ValidatedRequest]:
        """Do as `SubmissionValidator.validate`, and count it."""
        began = time.perf_counter()
        try:
            return await self._validator.validate(tenant, submission)
        finally:
            self.requests += 1
            self.seconds += time.perf_counter() - began
