"""`millstream gateway` that kills itself at a message that it stores.

`DOOM` in the environment says where: the beginning of the message's subject, which of these
messages it is, counted from 1, and `before` or `after` it is stored, with spaces between.
"""

import os
import signal
import sys
from itertools import count
from typing import Any

from gateway.admission import submitter
from millstream.cli import main
from streams.broker.broker_client import Broker, PubAck

_store = Broker.store
_subject, _number, _moment = os.environ["DOOM"].split()
_calls = count(1)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _store_and_die(self: Broker, subject: str, *args: Any, **named: Any) -> PubAck:
    is_last = subject.startswith(_subject) and next(_calls) == int(_number)
    if is_last and _moment == "before":
        _die()
    stored = await _store(self, subject, *args, **named)
    if is_last:
        _die()
    return stored


submitter.EXPIRY_MARGIN_SECONDS = 0.5
Broker.store = _store_and_die  # type: ignore[method-assign]
sys.exit(main())
