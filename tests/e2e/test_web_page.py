"""The bundled page in a real browser: what a person types, sees and interrupts."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from millstream.bench import target
from millstream.bench.load_client import GatewayAddress
from registry.models import mock_model
from registry.store import Registry
from tests.e2e.browser import CONTROL, ENTER, ESCAPE, Browser, chromium
from tests.support.accounts_server import connect
from tests.support.millstream_up import KEY, MillstreamUp
from tests.support.services import opened_registry
from tests.support.tcp_proxy import running_proxy

STATE = "document.getElementById('status').dataset.state"
TEXT = "document.getElementById('output').textContent"
MODELS = "!document.getElementById('model').disabled"


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(chrome: Browser, mock_up: MillstreamUp) -> Browser:
    """The page, freshly opened, with the key entered and the models loaded."""
    enter(chrome, mock_up.url, KEY)
    return chrome


def enter(browser: Browser, url: str, key: str) -> None:
    browser.open(url + "/")
    browser.fill("key", key)
    browser.click("prompt")
    browser.until(MODELS)


def run(browser: Browser, prompt: str, max_tokens: int) -> None:
    browser.fill("max-tokens", str(max_tokens))
    browser.fill("prompt", prompt)
    browser.type("prompt", CONTROL + ENTER)


def test_a_typed_prompt_streams_its_answer(browser: Browser, tmp_path: Path) -> None:
    """The first thing a stranger does; every figure beside the text must be there in the end."""
    run(browser, "tell me of the mill", 40)
    browser.until(f"{STATE} === 'length'")
    assert len(browser.text("output").split()) == 40
    assert browser.text("tokens") == "19 in, 40 out"
    assert browser.text("ttft").endswith("s")
    assert float(browser.text("rate")) > 0
    assert len(browser.text("request-id")) >= 22
    assert browser.script("return document.querySelectorAll('#stages tbody tr').length") >= 3
    browser.screenshot(tmp_path / "page.png")


def test_text_is_seen_while_it_is_generated(browser: Browser) -> None:
    """A page that waits for the end is no stream."""
    run(browser, "a long one", 4000)
    browser.until(f"{TEXT}.length > 50 && {STATE} === 'running'")
    browser.type("prompt", ESCAPE)
    browser.until(f"{STATE} === 'cancelled'")


def test_cancel_ends_the_answer_and_keeps_what_came(browser: Browser) -> None:
    """A person who stops reading has read what is there, and can ask again at once."""
    run(browser, "another long one", 4000)
    browser.until(f"{TEXT}.length > 50")
    browser.click("cancel")
    browser.until(f"{STATE} === 'cancelled'")
    assert len(browser.text("output")) > 50
    run(browser, "a short one", 3)
    browser.until(f"{STATE} === 'length'")


def test_a_dropped_socket_is_resumed_without_a_gap(chrome: Browser, mock_up: MillstreamUp) -> None:
    """A train enters a tunnel: the person sees it said, and the text goes on where it was."""
    with running_proxy(mock_up.url) as between:
        enter(chrome, between.url, KEY)
        chrome.script(
            "window.seen = []; new MutationObserver(() => window.seen.push("
            f"{STATE})).observe(document.getElementById('status'), {{attributes: true}})"
        )
        run(chrome, "a story with a tunnel", 600)
        chrome.until(f"{TEXT}.length > 200")
        between.drop_connections()
        chrome.until(f"{STATE} === 'length'")
        interrupted = chrome.text("output")
        assert "resuming" in chrome.script("return window.seen")
    enter(chrome, mock_up.url, KEY)
    run(chrome, "a story with a tunnel", 600)
    chrome.until(f"{STATE} === 'length'")
    assert chrome.text("output") == interrupted


def test_an_error_is_shown_with_its_code(browser: Browser) -> None:
    """`SequenceFailed` alone helps nobody."""
    run(browser, "far too much", 10_000_000)
    browser.until(f"{STATE} === 'failed'")
    assert browser.text("error").startswith("context_length_exceeded: ")


def test_a_wrong_key_is_told_before_anything_is_run(chrome: Browser, mock_up: MillstreamUp) -> None:
    """The browser hides why a WebSocket was refused, so the page asks for the models first."""
    chrome.open(mock_up.url + "/")
    chrome.fill("key", "sk-wrong")
    chrome.click("prompt")
    chrome.until("document.getElementById('key-note').textContent.includes('invalid_api_key')")
    assert chrome.script("return document.getElementById('model').disabled") is True


def test_the_key_is_kept_only_on_request(browser: Browser, mock_up: MillstreamUp) -> None:
    """A shared computer must not remember what nobody asked it to."""
    assert browser.script("return localStorage.length") == 0
    browser.click("remember")
    browser.open(mock_up.url + "/")
    browser.until(MODELS)
    browser.click("remember")
    assert browser.script("return localStorage.length") == 0


def test_a_model_without_workers_is_not_the_first_choice(
    chrome: Browser, mock_up: MillstreamUp
) -> None:
    """What an earlier start has registered stays; who asked it would wait for nothing."""
    asyncio.run(_change(mock_up, lambda registry: registry.add_model(mock_model("a-mill"))))
    try:
        enter(chrome, mock_up.url, KEY)
        assert chrome.script("return document.getElementById('model').value") == "mock"
        assert chrome.script("return document.getElementById('model').length") == 2
        asked = asyncio.run(
            target.fetch_models(GatewayAddress(mock_up.url, KEY), (), time.monotonic)
        )
        assert [model.name for model in asked] == ["mock"]
    finally:
        asyncio.run(_change(mock_up, lambda registry: registry.remove("a-mill")))


async def _change(up: MillstreamUp, change: Callable[[Registry], Awaitable[None]]) -> None:
    async with connect(up.nats_url, "test") as broker, opened_registry(broker) as registry:
        await change(registry)


def test_the_page_keeps_its_own_content_policy(browser: Browser) -> None:
    """Nothing from outside and nothing inline: a breach would be an error in the console."""
    browser.complaints()  # of earlier tests
    run(browser, "once", 5)
    browser.until(f"{STATE} === 'length'")
    assert browser.complaints() == []
