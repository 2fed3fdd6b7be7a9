"""The example with the chat page, in a real Chromium."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import muxkit
from muxkit_web import Pages
from tests._pages import ROOT, command
from tests.web._chromium import SECONDS, chromium

PROGRAM = command("examples/browser/README.md", "python ").split()[1]
WINDOW = 256  # numbers of 1 KiB that fit into a tab's window

pytestmark = pytest.mark.timeout(400)  # browsers start slowly on a busy machine


@asynccontextmanager
async def example(url: str = "bpmux+ws://127.0.0.1:0") -> AsyncIterator[str]:
    """Run the example as a program; give the address of its page."""
    process = await trio.lowlevel.open_process([sys.executable, PROGRAM, url], stdout=-1, cwd=ROOT)
    assert process.stdout is not None
    try:
        with trio.fail_after(SECONDS):
            said = b""
            while not said.endswith(b"\n"):
                said += await process.stdout.receive_some()
        yield said.decode().strip()
    finally:
        with trio.CancelScope(shield=True):
            process.terminate()
            await process.wait()


def number(text: str) -> int:
    return int(text.replace(",", ""))


async def test_the_chat_page_shows_presence_a_slow_reader_and_a_restart(tmp_path: Path) -> None:
    async with chromium(tmp_path) as browser:
        async with example() as page:
            ann = await browser.open(f"{page}/?name=ann")
            await ann.wait_for("document.getElementById('state').className === 'online'")
            bob = await browser.open(f"{page}/?name=bob")
            await ann.wait_for("document.getElementById('people').textContent === 'ann, bob'")

            await bob.evaluate("document.getElementById('text').value = 'hello <b>Ann</b>'")
            await bob.evaluate("document.getElementById('say').requestSubmit()")
            await ann.wait_for("document.getElementById('lines').textContent === 'bob: hello <b>Ann</b>'")

            # Ann stops reading. When what the server has sent doesn't change any more, it is one window ahead.
            await ann.wait_for("Number(document.getElementById('read').textContent.replace(',', '')) >= 500")
            await ann.evaluate("document.getElementById('slow').click()")
            before = -1
            # On a busy machine the page asks so late that it has read more than it knows to have been sent.
            while (sent := number(await ann.text("sent"))) != before or sent <= number(await ann.text("read")):
                before = sent
                await trio.sleep(0.6)  # the page asks four times per second
            ahead = sent - number(await ann.text("read"))
            assert 0 < ahead <= WINDOW + 2
            await bob.evaluate("document.getElementById('text').value = 'still there?'")
            await bob.evaluate("document.getElementById('say').requestSubmit()")
            await ann.wait_for("document.getElementById('lines').lastChild.textContent === 'bob: still there?'")
            if (folder := os.environ.get("MUXKIT_SCREENSHOTS")) is not None:
                await ann.screenshot(Path(folder) / "chat.png")
            await ann.evaluate("document.getElementById('slow').click()")
            await ann.wait_for(f"Number(document.getElementById('read').textContent.replace(',', '')) > {sent + 500}")

            await bob.close()
            await ann.wait_for("document.getElementById('people').textContent === 'ann'")
        await ann.wait_for("document.getElementById('state').className === 'offline'")
        async with example(page.replace("http", "bpmux+ws")):
            await ann.wait_for("document.getElementById('state').className === 'online'")
            await ann.wait_for("document.getElementById('people').textContent === 'ann'")


CONNECT = """
import("{module}").then(({{ connect }}) => connect("{url}")).then(
  (session) => session.close().then(() => "connected"),
  (error) => `${{error.name}}: ${{error.message}}`,
)
"""


async def test_a_page_of_a_foreign_origin_is_refused_and_a_listed_one_is_not(tmp_path: Path) -> None:
    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "index.html").write_text("<p>a page</p>", encoding="utf-8")
    url = "bpmux+ws://127.0.0.1:0"
    pages = Pages(tmp_path / "www")
    async with chromium(tmp_path) as browser, muxkit.open_server(echo, url, pages=pages) as foreign:
        origin = foreign.url.replace("bpmux+ws", "http")
        tab = await browser.open(f"{origin}/")
        async with muxkit.open_server(echo, url) as strict, muxkit.open_server(echo, url, origins=[origin]) as open_one:
            answers = [
                await tab.evaluate(CONNECT.format(module=f"{origin}/muxkit.js", url=server.url))
                for server in (foreign, strict, open_one)
            ]
    assert answers[0] == answers[2] == "connected"
    assert answers[1].startswith("LinkLost: no WebSocket at ws://127.0.0.1:")
    assert answers[1].endswith(f"see whether its log says that it doesn't accept pages of {origin}")
