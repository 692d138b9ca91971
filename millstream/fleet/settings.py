"""Settings of the commands that ask the fleet service."""

from pydantic import Field

from streams.base_settings import ClientSettings


class SignalsSettings(ClientSettings):
    """Settings of `millstream fleet signals`."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of tables")
