"""Settings of `millstream curves`."""

from pathlib import Path

from pydantic import Field

from millstream.admin.settings import AdminClientSettings
from streams.base_settings import POSITIONAL


class ListCurvesSettings(AdminClientSettings):
    """Settings of `millstream curves list`."""

    as_json: bool = Field(
        False, alias="json", description="print a JSON object a line instead of a table"
    )


class ShowCurveSettings(AdminClientSettings):
    """Settings of `millstream curves show`."""

    name: str = Field(
        description="name of the curve, TYPE/MODEL@VERSION", json_schema_extra=POSITIONAL
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class ImportCurvesSettings(AdminClientSettings):
    """Settings of `millstream curves import`."""

    file: Path = Field(
        description="JSON Lines, one curve in each, as `curves list --json` prints them",
        json_schema_extra=POSITIONAL,
    )
    as_json: bool = Field(
        False, alias="json", description="print a JSON object a line instead of words"
    )
