"""Drives a headless Chromium over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from trio_websocket import WebSocketConnection, open_websocket_url

SECONDS = 60
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")


class Tab:
    """A tab of the browser."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session

    async def evaluate(self, script: str) -> Any:  # noqa: ANN401 - whatever the script gives
        """Evaluate an expression in the page, wait for it if it is a promise, and return its value."""
        given = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = await self._browser.call("Runtime.evaluate", given, self._session)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def memory(self) -> int:
        """Return the bytes that the page's scripts hold, array buffers included, after a garbage collection."""
        await self.call("HeapProfiler.collectGarbage")
        used = await self.call("Runtime.getHeapUsage")
        return int(used["usedSize"]) + int(used["backingStorageSize"])

    async def call(self, method: str, **given: object) -> dict[str, Any]:
        """Call a method of the DevTools protocol for this tab."""
        return await self._browser.call(method, given, self._session)

    async def wait_for(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        look = f"const look = () => ({condition}) ? resolve() : setTimeout(look, 10)"
        await self.evaluate(f"new Promise(resolve => {{ {look}; look(); }})")

    async def text(self, id: str) -> str:
        return str(await self.evaluate(f"document.getElementById({id!r}).textContent"))

    async def screenshot(self, path: Path) -> None:
        answer = await self._browser.call("Page.captureScreenshot", {"format": "png"}, self._session)
        await trio.Path(path).write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        await self._browser.call("Target.closeTarget", {"targetId": self._target})


class Browser:
    """A running Chromium; made by `chromium`."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, trio.MemorySendChannel[dict[str, Any]]] = {}

    async def call(self, method: str, given: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        send, receive = trio.open_memory_channel[dict[str, Any]](1)
        self._answers[number] = send
        message = {"id": number, "method": method, "params": given}
        await self._socket.send_message(json.dumps(message | ({} if session is None else {"sessionId": session})))
        with trio.fail_after(SECONDS):
            answer = await receive.receive()
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    async def receive(self) -> None:
        while True:
            message = json.loads(await self._socket.get_message())
            if message.get("id") in self._answers:
                self._answers.pop(message["id"]).send_nowait(message)

    async def open(self, url: str) -> Tab:
        target = (await self.call("Target.createTarget", {"url": url}))["targetId"]
        attached = await self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        tab = Tab(self, target, attached["sessionId"])
        loaded = "document.readyState === 'complete' && location.href !== 'about:blank'"
        # Asking for a promise isn't possible here: those of the page before are never settled.
        while not await tab.evaluate(loaded):  # noqa: ASYNC110 - the event is in another process
            await trio.sleep(0.01)
        return tab


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Browser]:
    """Run a Chromium with its profile in `folder`; skips the test if there is none on this machine."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    log = folder / "chromium.log"
    command = [program, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    with log.open("w", encoding="utf-8") as said:
        process = await trio.lowlevel.open_process(command, stdout=said, stderr=said)
        try:
            with trio.fail_after(SECONDS):
                while (found := re.search(r"DevTools listening on (ws://\S+)", log.read_text())) is None:
                    assert process.returncode is None, log.read_text()
                    await trio.sleep(0.05)
            async with trio.open_nursery() as nursery, open_websocket_url(found[1]) as socket:
                browser = Browser(socket)
                nursery.start_soon(browser.receive)
                yield browser
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                process.terminate()
                await process.wait()
