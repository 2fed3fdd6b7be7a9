"""A headless Chromium that tests drive by the DevTools protocol, over a pair of pipes and without any package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 120.0  # s; reached only when something hangs

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; it comes with: apt-get install chromium")


class Browser:
    """One page in a browser; `complaints` are the errors that its console has shown."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.complaints: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], PATIENCE)[0], "the browser is silent"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        one, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(one)
        method, parameters = found.get("method", ""), found.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert")
        ):
            self.complaints.append(json.dumps(parameters))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(("file:", "about:")):
            self.complaints.append(f"it asks for {parameters['request']['url']}")
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append("a dialog opened")
        return found

    def open(self, page: Path) -> None:
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def run(self, script: str) -> Any:  # noqa: ANN401 - what the script says
        """Run a script of the page, wait for its promise if it is one, and return its value."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def drawn(self) -> None:
        """Wait until everything that was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self) -> bytes:
        self.drawn()
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser, and end it with the block."""
    to_read, to_write = os.pipe(), os.pipe()
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
        "--window-size=1280,800",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder / 'profile'}",
    ]
    # The browser reads commands from descriptor 3 and writes answers to 4.
    script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", str(to_read[0]), str(to_write[1]), str(CHROMIUM), *arguments],
        pass_fds=(to_read[0], to_write[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        yield Browser(to_write[0], to_read[1])
    finally:
        process.kill()
        process.wait()
        os.close(to_write[0])
        os.close(to_read[1])
