"""Settings of `millstream prices set` and `millstream prices list`."""

from pydantic import Field

from millstream.admin.settings import AdminClientSettings
from registry.price_records import CURRENCY, MillionPrice
from streams.base_settings import FLAG_ONLY, POSITIONAL


class PriceSettings(AdminClientSettings):
    """Settings of `millstream prices set`; prices are of a million tokens."""

    model: str = Field(description="name of the model", json_schema_extra=POSITIONAL)
    prompt: MillionPrice = Field(
        description="price of a million prompt tokens", json_schema_extra=FLAG_ONLY
    )
    completion: MillionPrice = Field(
        description="price of a million generated tokens", json_schema_extra=FLAG_ONLY
    )
    cached: MillionPrice | None = Field(
        None,
        description="price of a million prompt tokens that a prefix cache had; as --prompt unless "
        "given",
        json_schema_extra=FLAG_ONLY,
    )
    currency: str | None = Field(
        None,
        pattern=CURRENCY,
        description="code of ISO 4217, such as USD; that of the newest price unless given",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class PriceListSettings(AdminClientSettings):
    """Settings of `millstream prices list`."""

    all: bool = Field(
        False,
        description="also the prices that hold no longer",
        json_schema_extra=FLAG_ONLY,
    )
    limit: int = Field(
        100, ge=1, le=10_000, description="most entries to show", json_schema_extra=FLAG_ONLY
    )
    after: int = Field(
        0, ge=0, description="only versions above this one", json_schema_extra=FLAG_ONLY
    )
    as_json: bool = Field(
        False, alias="json", description="print a JSON object a line instead of a table"
    )
