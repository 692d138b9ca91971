"""The client for browsers, in one: streams that are cut, left, refused and forgotten."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from streams.accounts.access import UserClass
from tests.e2e.browser import Browser, chromium
from tests.e2e.test_web_page import STATE, TEXT, enter, run
from tests.integration.gateway.replies.test_cancel import outcomes
from tests.support.millstream_up import KEY, MillstreamUp, wait_until
from tests.support.tcp_proxy import running_proxy

CLIENT = f"""
const {{ Client }} = await import("/page/millstream.js");
const client = new Client({{ key: "{KEY}" }});
const ask = (prompt, max_tokens) => ({{ model: "mock", prompt, max_tokens, seed: 1 }});
"""
MANY = """
const read = async (i) => {
  let text = "", next = 0;
  for await (const chunk of client.generate(ask(`prompt ${i}`, 400))) {
    if (chunk.index !== next) throw new Error(`${chunk.index} came for ${next}`);
    next += chunk.count;
    text += chunk.text;
    window.received += chunk.count;
  }
  return text;
};
window.texts = null;
window.received = 0;
Promise.all(Array.from({ length: 10 }, (_, i) => read(i))).then((texts) => (window.texts = texts));
"""
# A gateway in the page's place of one: `answer(socket, frame)` is called with what it is sent.
FAKE = """
const sockets = [];
window.WebSocket = class {
  static OPEN = 1;
  readyState = 1;
  sent = [];
  constructor(url) {
    this.url = url;
    sockets.push(this);
    setTimeout(() => this.onopen());
  }
  send(text) {
    this.sent.push(JSON.parse(text));
    setTimeout(() => answer(this, this.sent.at(-1)));
  }
  say(frame) {
    this.onmessage?.({ data: JSON.stringify(frame) });
  }
  close() {}
};
const end = { finish_reason: "length", usage: {}, timing: {} };
const complete = (socket, { id }) => {
  socket.say({ type: "accepted", id, request_id: "r" });
  socket.say({ type: "chunk", id, index: 0, count: 1, text: "x" });
  socket.say({ type: "done", id, ...end });
};
"""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(chrome: Browser, mock_up: MillstreamUp) -> Browser:
    """A fresh page of the gateway."""
    chrome.open(mock_up.url + "/")
    return chrome


def test_a_gateway_that_is_killed_and_started_again_is_not_seen_in_the_text(
    chrome: Browser, tmp_path: Path
) -> None:
    """The person sees a pause, and then the rest of the very same answer."""
    words = ["--model", "mock", "--mock-itl-ms", "5", "--api-key", KEY]
    with MillstreamUp(tmp_path, *words) as up:
        up.wait_until_ready()
        texts = []
        for killed in (False, True):
            enter(chrome, up.url, KEY)
            run(chrome, "a story of a murder", 500)
            chrome.until(f"{TEXT}.length > 200")
            if killed:
                os.kill(up.pids(" gateway")[0], signal.SIGKILL)
                chrome.until(f"{STATE} === 'resuming'")
            chrome.until(f"{STATE} === 'length'")
            texts.append(chrome.text("output"))
    assert texts[0] == texts[1]


def test_many_streams_share_a_socket_that_is_cut(chrome: Browser, mock_up: MillstreamUp) -> None:
    """Each goes on where it was, on the next one."""
    with running_proxy(mock_up.url) as between:
        found = []
        for cut in (False, True):
            chrome.open(between.url + "/")
            chrome.evaluate(CLIENT + MANY)
            if cut:
                chrome.until("window.received > 500")
                between.drop_connections()
            chrome.until("window.texts")
            found.append(chrome.script("return window.texts"))
    assert len(set(found[0])) == 10
    assert found[0] == found[1]


def test_leaving_the_loop_cancels(browser: Browser, mock_up: MillstreamUp) -> None:
    """Nobody pays for what nobody reads."""
    ended = partial(outcomes, mock_up.nats_url, mock_up.files(UserClass.OPERATOR))
    before = len(asyncio.run(ended()))
    browser.evaluate(
        CLIENT + "for await (const chunk of client.generate(ask('a long one', 4000))) break;"
    )
    wait_until(lambda: len(asyncio.run(ended())) > before, 10)
    assert asyncio.run(ended())[-1][0] == "cancelled"


def test_an_abort_signal_ends_its_request_alone(browser: Browser) -> None:
    """As with `fetch`: the loop throws the signal's reason."""
    name, tokens = browser.evaluate(
        CLIENT
        + """
        const leaving = new AbortController();
        const other = client.generate(ask("another", 100));
        const stream = client.generate(ask("a long one", 4000), { signal: leaving.signal });
        let name = "";
        try {
          for await (const chunk of stream) leaving.abort();
        } catch (error) {
          name = error.name;
        }
        await other.text();
        return [name, (await other.ended).usage.completion_tokens];
        """
    )
    assert (name, tokens) == ("AbortError", 100)


def test_an_error_has_its_code(browser: Browser) -> None:
    """One that trying again does not help is told at once."""
    code = browser.evaluate(
        CLIENT
        + """
        const asked = client.generate({ model: "nothing", prompt: "x" }).text();
        return asked.catch((error) => error.code);
        """
    )
    assert code == "model_not_found"


def test_a_refusal_that_says_when_is_tried_again(browser: Browser) -> None:
    """As the same request, whatever became of the first try."""
    text, keys = browser.evaluate(
        FAKE
        + """
        const answer = (socket, { id }) => {
          if (socket.sent.length === 2) return complete(socket, { id });
          socket.say({ type: "error", id, code: "queue_full", message: "", retry_after_ms: 5 });
        };
        """
        + CLIENT
        + """
        const text = await client.generate(ask("p", 1)).text();
        return [text, sockets[0].sent.map((frame) => frame.idempotency_key)];
        """
    )
    assert text == "x"
    assert len(keys) == 2
    assert keys[0] == keys[1]


def test_tokens_of_another_request_are_never_joined_to_those_that_came(browser: Browser) -> None:
    """Sent again when even its key is forgotten, a request may be answered otherwise."""
    code = browser.evaluate(
        FAKE
        + """
        let asked = 0;
        const answer = (socket, { type, id }) => {
          if (type === "resume") {
            socket.say({ type: "error", id, code: "request_not_found", message: "" });
            return;
          }
          socket.say({ type: "accepted", id, request_id: `r${asked++}` });
          socket.say({ type: "chunk", id, index: 0, count: 1, text: "x" });
          if (asked === 1) setTimeout(() => socket.onclose({ code: 1006 }));
          else socket.say({ type: "done", id, ...end });
        };
        """
        + CLIENT
        + """
        return await client.generate(ask("p", 1)).text().catch((error) => error.code);
        """
    )
    assert code == "log_lost"


def test_a_silent_gateway_is_left(browser: Browser) -> None:
    """A page cannot ping; it asks for an error, and goes elsewhere when none comes."""
    text, sent = browser.evaluate(
        FAKE
        + "const answer = (socket, frame) => sockets.length > 1 && complete(socket, frame);"
        + CLIENT
        + """
        const text = await client.generate(ask("p", 1)).text();
        return [text, sockets[0].sent.map((frame) => frame.type)];
        """
    )
    assert text == "x"
    assert sent == ["generate", "cancel"]


def test_a_slow_readers_rest_is_fetched_when_it_has_read_what_came(browser: Browser) -> None:
    """A browser reads sockets whether the page keeps up or not; what waits must have a bound."""
    found = browser.evaluate(
        FAKE
        + """
        const answer = (socket, { id, after }) => {
          socket.say({ type: "accepted", id, request_id: "r" });
          for (let index = (after ?? -1) + 1; index < 9; index++)
            socket.say({ type: "chunk", id, index, count: 1, text: "x".repeat(100000) });
          socket.say({ type: "done", id, ...end });
        };
        """
        + CLIENT
        + """
        const found = [];
        for await (const chunk of client.generate(ask("p", 9))) found.push(chunk.index);
        return [found, sockets[0].sent.map((frame) => frame.after ?? null)];
        """
    )
    assert found == [list(range(9)), [None, 2, 5, 8]]


FLOOD = """
const seen = () => new Promise((resolve) => setTimeout(resolve, 20));
const frames = (socket) => socket.sent.map(({ type, id }) => [type, id]);
const answer = (socket, { type, id }) => {
  const cancelled = { type: "done", id, ...end, finish_reason: "cancelled" };
  if (type === "cancel") return socket.say(cancelled);
  socket.say({ type: "accepted", id, request_id: "r" });
  for (let index = 0; type === "generate" && index < 9; index++)
    socket.say({ type: "chunk", id, index, count: 1, text: "x".repeat(100000) });
};
"""
FLOODED = FAKE + FLOOD + CLIENT


def test_leaving_a_stream_that_is_behind_cancels_it(browser: Browser) -> None:
    """Its id is no longer listened to, and is still what the gateway knows it by."""
    sent = browser.evaluate(
        FLOODED
        + """
        for await (const chunk of client.generate(ask("p", 9))) break;
        await seen();
        return frames(sockets[0]);
        """
    )
    assert sent == [["generate", "1"], ["cancel", "1"]]


@pytest.mark.parametrize("way", ["return", "cancel"])
def test_a_stream_whose_socket_was_lost_while_it_was_behind_is_ended_on_the_next(
    browser: Browser, way: str
) -> None:
    """It is not open there; nobody but its reader would open it."""
    sent = browser.evaluate(
        FLOODED
        + f"""
        const stream = client.generate(ask("p", 9));
        await stream.next();
        sockets[0].onclose({{ code: 1006 }});
        stream.{way}();
        await seen();
        return frames(sockets[1]);
        """
    )
    assert sent == [["resume", "2"], ["cancel", "2"]]


def test_a_cancel_that_was_lost_with_its_socket_is_sent_on_the_next(browser: Browser) -> None:
    """Where the gateway has died nobody else would end the request. Once it has ended it is
    forgotten: nothing is sent of it on a third."""
    sent = browser.evaluate(
        FLOODED
        + """
        for await (const chunk of client.generate(ask("p", 9))) break;
        sockets[0].onclose({ code: 1006 });
        await seen();
        sockets[1].onclose({ code: 1006 });
        client.generate(ask("another", 9));
        await seen();
        return [frames(sockets[1]), frames(sockets[2])];
        """
    )
    assert sent == [[["resume", "2"], ["cancel", "2"]], [["generate", "3"]]]


def test_a_revoked_key_ends_every_request_and_is_not_tried_again(browser: Browser) -> None:
    """Also of those whose readers have left: no gateway would let them be cancelled."""
    codes, count = browser.evaluate(
        FLOODED
        + """
        const stream = client.generate(ask("p", 9));
        await stream.next();
        const other = client.generate(ask("another", 9));
        sockets[0].onclose({ code: 1008, reason: "key_revoked" });
        const codes = [];
        for (const each of [stream, other]) await each.ended.catch(({ code }) => codes.push(code));
        await new Promise((resolve) => setTimeout(resolve, 300));
        return [codes, sockets.length];
        """
    )
    assert (codes, count) == (["key_revoked", "key_revoked"], 1)


def test_closing_the_client_between_two_sockets_cancels_on_the_next(browser: Browser) -> None:
    """And leaves that one, too."""
    sent, state = browser.evaluate(
        FLOODED
        + """
        const stream = client.generate(ask("p", 9));
        await stream.next();
        sockets[0].onclose({ code: 1006 });
        client.close();
        await seen();
        return [frames(sockets[1]), sockets[1].onmessage];
        """
    )
    assert (sent, state) == ([["resume", "2"], ["cancel", "2"]], None)
