"""CloudEvents 1.0 of exported requests, as OpenMeter and other meters take them. Pure.

The id of an event is the request's, its source the cell and its subject the tenant. A meter that
knows an event by id and source therefore counts a request once, however often it is sent.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import orjson

CONTENT_TYPE = "application/cloudevents-batch+json"
EVENT_TYPE = "millstream.request"
_DATA = (
    "model",
    "version",
    "adapter",
    "key",
    "user",
    "priority",
    "outcome",
    "attempts",
    "worker_ms",
    "worker_type",
    "price_version",
    "currency",
)


def to_event(line: dict[str, Any], cell: str) -> dict[str, Any]:
    """Return the event of one line of type `request`; `cell` names the installation.

    Its time is when the request was accepted. The tokens are those that are billed, and `charge` is
    text, since it may be above what a JSON number holds exactly in some languages.
    """
    billed = line["billed_tokens"]
    accepted = datetime.fromtimestamp(line["accepted"] / 1000, UTC)
    return {
        "specversion": "1.0",
        "id": line["request_id"],
        "source": cell,
        "type": EVENT_TYPE,
        "subject": line["tenant"],
        "time": accepted.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "data": {
            **{name: line[name] for name in _DATA},
            "prompt_tokens": billed["prompt"],
            "completion_tokens": billed["completion"],
            "cached_tokens": billed["cached"],
            "charge": str(line["charge"]),
        },
    }


def encode_batch(lines: Iterable[dict[str, Any]], cell: str) -> bytes:
    """Return the events of these lines in JSON batch format."""
    return orjson.dumps([to_event(line, cell) for line in lines])
