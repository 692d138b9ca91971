"""The metadata services of AWS, GCP and Azure behind one interface."""

import json
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, TypeVar
from urllib.parse import urlencode

from gpu_worker.reclaim import reclaim_notice
from gpu_worker.reclaim.metadata_client import MetadataAnswer, MetadataClient, MetadataUnavailable
from gpu_worker.reclaim.reclaim_notice import ReclaimNotice, UnreadableNotice

T = TypeVar("T")

METADATA_URL = "http://169.254.169.254"  # the same of all three
_AWS_TOKEN_SECONDS = 21_600  # the longest that there is
_GCP_WAIT_SECONDS = 20
_GCP_ANSWER_SECONDS = _GCP_WAIT_SECONDS + 5.0


class Provider(StrEnum):
    """Whose metadata service a machine has."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


class NoticeSource(Protocol):
    """A service that tells a machine that it is taken back."""

    async def look(self) -> ReclaimNotice | None:
        """Return what the provider says now, None if nothing.

        May wait for a change, for up to half a minute. Raises `MetadataUnavailable`.
        """

    async def acknowledge(self, notice: ReclaimNotice) -> None:
        """Tell the provider that the machine is drained, so that it need not wait.

        Does nothing where a provider has no way to be told. Raises `MetadataUnavailable`.
        """


class AwsNotices:
    """Spot interruption notices of EC2 by IMDSv2, and its rebalance recommendations as hints.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._token = ""

    async def look(self) -> ReclaimNotice | None:
        """Return the interruption, or else the hint, or None."""
        if action := await self._read("spot/instance-action"):
            return _parsed(lambda: reclaim_notice.parse_instance_action(action))
        if hint := await self._read("events/recommendations/rebalance"):
            return _parsed(lambda: reclaim_notice.parse_rebalance(hint))
        return None

    async def acknowledge(self, notice: ReclaimNotice) -> None:
        """Do nothing: EC2 takes the machine at the time that it has told."""

    async def _read(self, name: str) -> bytes | None:
        """Return a document; None if there is none. A token that has expired is replaced once."""
        answer = await self._get(name)
        if answer.status == 401:
            self._token = ""
            answer = await self._get(name)
        if answer.status == 404:
            return None
        return _checked(answer, name).body

    async def _get(self, name: str) -> MetadataAnswer:
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_SECONDS)}
            answer = await self._client.request("PUT", "/latest/api/token", lifetime)
            self._token = _header_value(_checked(answer, "token").body)
        token = {"X-aws-ec2-metadata-token": self._token}
        return await self._client.request("GET", f"/latest/meta-data/{name}", token)


class GcpNotices:
    """Preemption of a spot VM of Compute Engine.

    https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange
    """

    def __init__(self, client: MetadataClient, now: Callable[[], float]) -> None:
        self._client, self._now = client, now
        self._etag = ""  # of the last answer, from which on changes are waited for

    async def look(self) -> ReclaimNotice | None:
        """Return the preemption: as it is at first, and then once it changes."""
        path = "/computeMetadata/v1/instance/preempted"
        if self._etag:
            waiting = {"wait_for_change": "true", "timeout_sec": str(_GCP_WAIT_SECONDS)}
            path += "?" + urlencode({**waiting, "last_etag": self._etag})
        flavor = {"Metadata-Flavor": "Google"}
        answer = await self._client.request("GET", path, flavor, seconds=_GCP_ANSWER_SECONDS)
        if answer.headers.get("metadata-flavor") != "Google":
            raise MetadataUnavailable("what answers is not Google's metadata server")
        body = _checked(answer, "instance/preempted").body
        notice = _parsed(lambda: reclaim_notice.parse_preempted(body, self._now()))
        self._etag = answer.headers.get("etag", "")
        return notice

    async def acknowledge(self, notice: ReclaimNotice) -> None:
        """Do nothing: a VM that shuts itself down ends early."""


class AzureNotices:
    """Scheduled events of an Azure VM that preempt it.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"

    def __init__(self, client: MetadataClient, now: Callable[[], float]) -> None:
        self._client, self._now = client, now
        self._machine = ""

    async def look(self) -> ReclaimNotice | None:
        """Return the preemption of this machine; events of others in its set are left out."""
        if not self._machine:
            answer = await self._client.request("GET", self._NAME, {"Metadata": "true"})
            self._machine = _machine_name(_checked(answer, "name").body)
        answer = await self._client.request("GET", self._EVENTS, {"Metadata": "true"})
        body = _checked(answer, "scheduledevents").body
        return _parsed(
            lambda: reclaim_notice.parse_scheduled_events(body, self._machine, self._now())
        )

    async def acknowledge(self, notice: ReclaimNotice) -> None:
        """Let the event start at once, instead of at its time."""
        body = json.dumps({"StartRequests": [{"EventId": notice.id}]}).encode()
        headers = {"Metadata": "true", "Content-Type": "application/json"}
        _checked(await self._client.request("POST", self._EVENTS, headers, body), "StartRequests")


def make_source(provider: Provider, url: str, now: Callable[[], float]) -> NoticeSource:
    """Return the notices of a provider's metadata service at `url`; `now` is in epoch seconds."""
    client = MetadataClient(url)
    if provider is Provider.AWS:
        return AwsNotices(client)
    if provider is Provider.GCP:
        return GcpNotices(client, now)
    return AzureNotices(client, now)


def _checked(answer: MetadataAnswer, what: str) -> MetadataAnswer:
    if answer.status != 200:
        raise MetadataUnavailable(f"it answers the question for {what} with {answer.status}")
    return answer


def _header_value(token: bytes) -> str:
    """Return a token that can be a header: printable ASCII, and not empty."""
    text = token.decode("latin-1").strip()
    if not text or not text.isascii() or not text.isprintable():
        raise MetadataUnavailable(f"{len(token)} bytes are no token")
    return text


def _machine_name(body: bytes) -> str:
    name = body.decode(errors="replace").strip()
    if not re.fullmatch(r"[\w.-]{1,80}", name):
        raise MetadataUnavailable(f"{len(body)} bytes are no name of a machine")
    return name


def _parsed(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except UnreadableNotice as error:
        raise MetadataUnavailable(f"its answer cannot be read: {error}") from error
