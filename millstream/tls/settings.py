"""Settings of `millstream tls init`."""

from pathlib import Path

from pydantic import Field

from streams.base_settings import FLAG_ONLY, POSITIONAL, LogLevel, Settings, Slug
from streams.certificates import CERTIFICATE_DAYS


class TlsInitSettings(Settings):
    """Settings of `millstream tls init`: where the files go, and for which hosts and clients."""

    log_level: LogLevel = Field("error", description="least severe log event to write")
    directory: Path = Field(
        description="directory of the authority and its certificates; an authority that is there "
        "is used again",
        json_schema_extra=POSITIONAL,
    )
    host: tuple[str, ...] = Field(
        (),
        description="host name or address of the gateway, beside localhost; repeatable",
        json_schema_extra=FLAG_ONLY,
    )
    client: tuple[Slug, ...] = Field(
        (),
        description="client to make a certificate for, with the URI spiffe://millstream/NAME; "
        "repeatable",
        json_schema_extra=FLAG_ONLY,
    )
    days: float = Field(
        CERTIFICATE_DAYS, gt=0, description="how long the certificates are valid, in days"
    )
    as_json: bool = Field(False, alias="json", description="print the files' paths as JSON")
