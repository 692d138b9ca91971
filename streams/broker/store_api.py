"""JetStream's management API, asked in the store that has the stream.

The admin service reaches two stores, each under a name of its own; all others ask as if there were
one.
"""

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import DEFAULT_PREFIX

from streams.accounts.access import UserClass, api_subject


class StoreApi(JetStreamContext):
    """nats-py's management API for a connection of a user of this class; None: without accounts."""

    def __init__(self, client: Client, user_class: UserClass | None, timeout: float) -> None:
        super().__init__(client, timeout=timeout)
        self._user_class = user_class

    async def _api_request(
        self, req_subject: str, req: bytes = b"", timeout: float = 5
    ) -> dict[str, object]:
        """Send the question to the store that has the stream which the call is about."""
        call = req_subject.removeprefix(f"{DEFAULT_PREFIX}.")
        subject = api_subject(self._user_class, call)
        return await super()._api_request(subject, req, timeout)
