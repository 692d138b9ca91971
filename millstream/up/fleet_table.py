"""The table `[fleet]` of the configuration file of `millstream up`."""

from pydantic import BaseModel, ConfigDict


class FleetTable(BaseModel):
    """A `[fleet]` table: where there is one, `up` runs a fleet service."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
