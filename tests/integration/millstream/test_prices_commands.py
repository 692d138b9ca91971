"""`millstream prices`: what the admin service enters is what the book says, to the last decimal."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from millstream.admin.admin_client import AdminRefused, list_all
from millstream.prices.commands import list_prices, set_price
from millstream.prices.settings import PriceListSettings, PriceSettings
from registry.models import mock_model
from registry.price_book import PriceBook
from streams.usage_accounts import Price
from tests.support.accounts_server import connect
from tests.support.admins import ADMIN_KEY, running_admin

STOP = asyncio.Event()


@pytest.fixture(params=["http", "nats"])
async def door(
    nats_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[dict[str, Any]]:
    """The settings by which a command finds the admin service, which knows the model `org/m`."""
    (tmp_path / "key").write_text(ADMIN_KEY)
    with capture_logs():
        async with running_admin(nats_url) as client:
            record = mock_model("org/m").model_dump(mode="json")
            await client.call("models.put", name="org/m", model=record)
            by_http = {"admin": client.url, "admin_key_file": tmp_path / "key"}
            yield by_http if request.param == "http" else {"nats": nats_url}


async def enter(door: dict[str, Any], prompt: str, completion: str, **others: str) -> None:
    told = {**door, "model": "org/m", "prompt": prompt, "completion": completion, **others}
    await set_price(PriceSettings.model_validate(told), STOP)


async def listed(
    door: dict[str, Any], capsys: pytest.CaptureFixture[str], **flags: Any
) -> list[dict[str, Any]]:
    capsys.readouterr()
    await list_prices(PriceListSettings.model_validate({**door, **flags, "json": True}), STOP)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def test_a_price_is_entered_and_its_predecessor_stays(
    nats_url: str, door: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same price again enters nothing; without a currency it is that of the newest price."""
    await enter(door, "0.15", "0.000001", cached="0.075", currency="EUR")
    await enter(door, "0.150", "0.000001", cached="0.075")
    assert "0.15 EUR for a million prompt tokens" in capsys.readouterr().out
    await enter(door, "2", "1000000")
    (current,) = await listed(door, capsys)
    assert current == {
        "version": 2,
        "model": "org/m",
        "currency": "EUR",
        "prompt": "2",
        "cached": "2",
        "completion": "1000000",
        "since": current["since"],
        "current": True,
    }
    old, same = await listed(door, capsys, all=True)
    assert (same, old["version"], old["cached"], old["current"]) == (current, 1, "0.075", False)
    assert await listed(door, capsys, all=True, after=1) == [current]
    assert await listed(door, capsys, all=True, limit=1) == [old]
    async with connect(nats_url, "test") as broker:
        book = await PriceBook.open(broker)
        prices = [record.entry.price for record in book.records]
        await book.close()
    assert prices == [Price(150_000, 1, 75_000), Price(2_000_000, 10**12, None)]


async def test_the_table_has_what_holds(
    door: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """For people."""
    await enter(door, "0.5", "1.25", currency="USD")
    capsys.readouterr()
    await list_prices(PriceListSettings.model_validate(door), STOP)
    out = capsys.readouterr().out
    assert all(word in out for word in ("org/m", "USD", "0.5", "1.25", "since"))


async def test_what_cannot_be_a_price_is_refused(
    door: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A price of an unknown model or currency is entered nowhere."""
    with pytest.raises(AdminRefused, match="must not cost more") as refused:
        await enter(door, "1", "1", cached="2")
    assert refused.value.code == "invalid_request"
    with pytest.raises(AdminRefused, match="the model 'none' does not exist") as refused:
        await set_price(
            PriceSettings.model_validate(
                {**door, "model": "none", "prompt": "1", "completion": "1"}
            ),
            STOP,
        )
    assert refused.value.code == "model_not_found"
    assert await listed(door, capsys, all=True) == []


async def test_a_list_goes_on_where_a_page_ends(nats_url: str) -> None:
    """In order of version, of one model or of all; version 10 comes after 9."""
    async with running_admin(nats_url) as client:
        for name in ("m", "n"):
            record = mock_model(name).model_dump(mode="json")
            await client.call("models.put", name=name, model=record)
        for number in range(12):
            await client.call("prices.set", name="mn"[number % 2], prompt=number, completion=0)
        page = await client.call("prices.list", all=True, limit=3)
        assert ([each["version"] for each in page["data"]], page["has_more"]) == ([1, 2, 3], True)
        every = await list_all(client, "prices.list", by="version", all=True, limit=5)
        assert [each["version"] for each in every] == [*range(1, 13)]
        (current,) = await list_all(client, "prices.list", by="version", model="n")
        assert (current["version"], current["prompt"], current["cached"]) == (12, "11", None)


@pytest.mark.parametrize("price", ["0.0000001", -1, 1_000_001, "NaN", "1e999999", [], None])
async def test_the_service_checks_prices_itself(nats_url: str, price: object) -> None:
    """Whatever asks it."""
    async with running_admin(nats_url) as client:
        with pytest.raises(AdminRefused) as refused:
            await client.call("prices.set", name="m", prompt=price, completion=0)
        assert refused.value.code == "invalid_request"
