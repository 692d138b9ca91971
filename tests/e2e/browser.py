"""Headless Chromium by the W3C WebDriver protocol: the dozen calls that a page test needs."""

import json
import re
import shutil
import subprocess
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,1000",
]
CONTROL, ENTER, ESCAPE = "\ue009", "\ue007", "\ue00c"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, by the standard
SECONDS = 60  # a patience, not a promise: beside other tests a page is slow
UNTIL = """
const done = arguments[arguments.length - 1];
const look = () => ((%s) ? done(true) : setTimeout(look, 10));
look();
"""


PROMISE = """
const done = arguments[arguments.length - 1];
(async () => {%s})().then((value) => done({value}), (error) => done({error: `${error.stack}`}));
"""


class Browser:
    """One session. Elements are named by their `id` attribute; a failure says its reason."""

    def __init__(self, driver: str) -> None:
        self._url = driver + "/session"
        options = {"args": FLAGS, "binary": _binary("chromium")}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        made = self._post("", {"capabilities": {"alwaysMatch": wanted}})
        self._url += "/" + made["sessionId"]
        self._post("/timeouts", {"script": SECONDS * 1000})

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def click(self, id: str) -> None:
        self._post(f"/element/{self._element(id)}/click", {})

    def type(self, id: str, text: str) -> None:
        """Press keys with the focus on an element."""
        self._post(f"/element/{self._element(id)}/value", {"text": text})

    def fill(self, id: str, text: str) -> None:
        """Replace what a field holds."""
        self._post(f"/element/{self._element(id)}/clear", {})
        self.type(id, text)

    def text(self, id: str) -> str:
        return str(self._post(f"/element/{self._element(id)}/property/textContent"))

    def script(self, code: str) -> Any:
        return self._post("/execute/sync", {"script": code, "args": []})

    def evaluate(self, code: str) -> Any:
        """What the body of an async function returns; fails with what it throws."""
        done = self._post("/execute/async", {"script": PROMISE % code, "args": []})
        assert "error" not in done, done["error"]
        return done.get("value")

    def until(self, condition: str) -> None:
        """Wait for a JavaScript expression to be true; fails after `SECONDS`."""
        self._post("/execute/async", {"script": UNTIL % condition, "args": []})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(b64decode(self._post("/screenshot")))

    def complaints(self) -> list[str]:
        """What the page wrote to the console as an error, such as a breach of its policy."""
        entries = self._post("/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self._call("DELETE", "", None)

    def _element(self, id: str) -> str:
        found = self._post("/element", {"using": "css selector", "value": f"[id='{id}']"})
        return str(found[ELEMENT])

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("GET" if body is None else "POST", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS + 5) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            reason = json.load(error)["value"]
            raise AssertionError(f"{path}: {reason['error']}: {reason['message']}") from None


def _binary(name: str) -> str:
    path = shutil.which(name)
    assert path, f"{name} is not installed"
    return path


@contextmanager
def chromium() -> Iterator[Browser]:
    """A fresh browser; it and its driver end with the block."""
    command = [_binary("chromedriver"), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            browser = Browser(f"http://127.0.0.1:{_port(driver)}")
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()


def _port(driver: "subprocess.Popen[str]") -> str:
    assert driver.stdout
    for line in driver.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return found[1]
    raise AssertionError("chromedriver did not start")
