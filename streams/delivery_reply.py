"""Reply subjects of JetStream's deliveries, which tell what was delivered (ADR-15)."""

from typing import NamedTuple, Self

_PREFIX = ["$JS", "ACK"]


class DeliveryReply(NamedTuple):
    """Facts about one delivery of a stored message, by the subject on which it is acknowledged.

    `num_delivered` is how often the message has been delivered, this delivery included; `seq` is
    its sequence in the stream, and `stored_ns` the time of its storage in epoch nanoseconds.
    """

    stream: str
    consumer: str
    num_delivered: int
    seq: int
    stored_ns: int

    @classmethod
    def parse(cls, reply: str) -> Self:
        """Return the facts of a reply subject; raises ValueError or IndexError for another one."""
        fields = reply.split(".")
        if len(fields) > 9:  # $JS.ACK.<domain>.<account>.<stream>.<consumer>.…, maybe a token more
            fields = fields[:2] + fields[4:]
        if fields[:2] != _PREFIX:
            raise ValueError(f"{reply!r} is no reply subject of a delivery")
        return cls(fields[2], fields[3], int(fields[4]), int(fields[5]), int(fields[7]))
