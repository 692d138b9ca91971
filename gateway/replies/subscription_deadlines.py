"""Deadlines of a log subscription: when to check, search, give up or cancel its request. Pure."""

from dataclasses import dataclass, field

FIRST_CHECK_SECONDS, MAX_CHECK_SECONDS = 5.0, 60.0
FIRST_SEARCH_SECONDS, SEARCH_SECONDS = 1.0, 5.0
FIRST_CANCEL_SECONDS, MAX_CANCEL_SECONDS = 0.25, 4.0


@dataclass
class SubscriptionDeadlines:
    """The times at which something is due for one log subscription.

    Times are seconds of any one clock, passed by the caller.
    """

    last_heard_at: float  # when the last reply came
    expires_at: float  # the request has ended by then, whatever happens
    check_seconds: float = field(default_factory=lambda: FIRST_CHECK_SECONDS)
    lost_at: float | None = None  # when the log was found to be gone; None: it is not
    has_been_lost: bool = False  # the log was gone once; whoever put it back may not go on with it
    search_at: float = 0.0  # when to ask for a lost log again
    orphaned_until: float | None = None  # end of the grace period, once the reader has left
    cancel_at: float | None = None  # when to send the next cancel; None: not to be cancelled
    cancel_retry_seconds: float = FIRST_CANCEL_SECONDS

    @property
    def has_reader(self) -> bool:
        """True while the reader is here and its request is not being cancelled."""
        return self.orphaned_until is None and self.cancel_at is None

    def mark_record(self) -> None:
        """Note that a record was taken: the log is not lost, and the next check is due in 5 s."""
        self.check_seconds, self.lost_at = FIRST_CHECK_SECONDS, None

    def needs_check(self, now: float) -> bool:
        """Return True if no reply has come for a while, so that the log should be read.

        The while is 5 s at first and is doubled by each check up to 60 s, because requests that
        wait in a queue have no replies.
        """
        return now - self.last_heard_at > self.check_seconds

    def mark_checked(self, now: float) -> None:
        """Note that the silent log is being read now; the time to the next check doubles.

        One that was lost and put back counts as lost again: with its broker's memory its place in a
        queue may be gone, and then nobody goes on with it.
        """
        self.last_heard_at = now
        if self.has_been_lost:
            self.mark_lost(now)
        self.check_seconds = min(2 * self.check_seconds, MAX_CHECK_SECONDS)

    def mark_lost(self, now: float) -> None:
        """Note that the log is gone; does nothing if that is known.

        The first search is due in a second, since the log's writer may put it back by then.
        """
        if self.lost_at is None:
            self.lost_at, self.search_at = now, now + FIRST_SEARCH_SECONDS
        self.has_been_lost = True

    def mark_writer_found(self, now: float) -> None:
        """Note that somebody will write the lost log again: it counts as lost from now on only."""
        if self.lost_at is not None:
            self.lost_at = now

    def is_lost(self, now: float, seconds: float = 0.0) -> bool:
        """Return True if the log was lost at least `seconds` ago and no record has come since."""
        return self.lost_at is not None and now >= self.lost_at + seconds

    def needs_search(self, now: float) -> bool:
        """Return True if the log is lost and it is time to ask who has it."""
        return self.is_lost(now) and now >= self.search_at

    def mark_searched(self, now: float) -> None:
        """Note that somebody is being asked for the lost log; the next search is due in 5 s."""
        self.search_at = now + SEARCH_SECONDS

    def is_abandoned(self, now: float) -> bool:
        """Return True if the reader left, its grace period is over, and no cancel was begun."""
        grace_ends_at = self.orphaned_until
        return grace_ends_at is not None and now >= grace_ends_at and self.cancel_at is None

    def needs_cancel(self, now: float) -> bool:
        """Return True if it is time to send a cancel message."""
        return self.cancel_at is not None and now >= self.cancel_at

    def mark_cancel_sent(self, now: float) -> None:
        """Note that a cancel message was sent at `now`, and when to send the next one.

        A message may get lost, so they are repeated until the request ends: first after 0.25 s,
        then after pauses that double up to 4 s.
        """
        self.cancel_at = now + self.cancel_retry_seconds
        self.cancel_retry_seconds = min(2 * self.cancel_retry_seconds, MAX_CANCEL_SECONDS)

    def mark_cancel_failed(self, now: float) -> None:
        """Note at `now` that the broker took no cancel; the next one is due in 0.25 s."""
        self.cancel_at = now + FIRST_CANCEL_SECONDS
        self.cancel_retry_seconds = FIRST_CANCEL_SECONDS
