"""The lives of `_lives.py` in a page of Chromium, and bulk data whose reader stalls on either end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

import muxkit
from tests.web._chromium import chromium
from tests.web._pages import living, page_at, pages

pytestmark = pytest.mark.timeout(400)  # browsers start slowly on a busy machine

MIB = 1024 * 1024
SIZE = (100 if os.environ.get("MUXKIT_SOAK") else 20) * MIB
BLOCK = bytes(index * 31 % 256 for index in range(65_536))
MOST = 16 * MIB  # bytes by which the memory of either end may grow. A transfer is larger, and a window is 256 KiB.

START = """
(async () => {{
  const {{ connect }} = await import("/muxkit.js");
  globalThis.session = await connect("{url}");
  globalThis.channel = await session.open("{name}");
  globalThis.block = Uint8Array.from({{ length: 65_536 }}, (_, index) => index * 31);
  globalThis.done = 0;
}})()
"""
READ = """
globalThis.reading = (async () => {
  let wrong = 0;
  for await (const message of channel) {
    if (!message.every((byte, index) => byte === block[index])) wrong += 1;
    done += message.length;
  }
  return wrong;
})();
0
"""
WRITE = """
globalThis.writing = (async () => {{
  for (; done < {size}; done += block.length) await channel.send(block);
  await channel.finish();
}})();
0
"""


def resident() -> int:
    """Return the bytes that this process has resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Ends:
    """A server for one bulk channel in each direction, whose handler may stall."""

    def __init__(self) -> None:
        self.moved = 0
        self.wrong = 0
        self.may_read = trio.Event()
        self.is_over = trio.Event()

    async def flood(self, channel: muxkit.Channel) -> None:
        for _ in range(SIZE // len(BLOCK)):
            await channel.send(BLOCK)
            self.moved += len(BLOCK)
        await channel.finish()

    async def sink(self, channel: muxkit.Channel) -> None:
        await self.may_read.wait()
        async for message in channel:
            self.moved += len(message)
            self.wrong += message != BLOCK
        self.is_over.set()


async def test_random_lives_between_a_page_and_python_are_byte_exact(tmp_path: Path) -> None:
    async with living(tmp_path) as page:
        await page.live(range(6))


async def test_a_page_that_does_not_read_stops_the_server_with_bounded_memory(tmp_path: Path) -> None:
    ends = Ends()
    url = "bpmux+ws://127.0.0.1:0"
    handler = muxkit.by_name({"flood": ends.flood, "sink": ends.sink})
    async with chromium(tmp_path) as browser, muxkit.open_server(handler, url, pages=pages(tmp_path / "www")) as server:
        tab = await browser.open(page_at(server.url))
        before, here = await tab.memory(), resident()
        await tab.evaluate(START.format(url=server.url.removeprefix("bpmux+"), name="flood"))
        stalled = -1
        for _ in range(5):  # when nothing more was sent during a few round trips, the server is waiting
            while stalled != ends.moved:
                stalled = ends.moved
                await tab.evaluate("session.ping().then(() => 0)")
        assert 0 < stalled < 2 * MIB
        assert await tab.memory() - before < MOST
        await tab.evaluate(READ)
        grown = 0
        while await tab.evaluate("done") < SIZE:
            grown = max(grown, await tab.memory() - before)
        assert await tab.evaluate("reading") == 0
        assert ends.moved == SIZE
        assert grown < MOST
        assert resident() - here < MOST


async def test_a_server_that_does_not_read_stops_a_page_with_bounded_memory(tmp_path: Path) -> None:
    ends = Ends()
    url = "bpmux+ws://127.0.0.1:0"
    handler = muxkit.by_name({"flood": ends.flood, "sink": ends.sink})
    async with chromium(tmp_path) as browser, muxkit.open_server(handler, url, pages=pages(tmp_path / "www")) as server:
        tab = await browser.open(page_at(server.url))
        before, here = await tab.memory(), resident()
        await tab.evaluate(START.format(url=server.url.removeprefix("bpmux+"), name="sink"))
        await tab.evaluate(WRITE.format(size=SIZE))
        stalled = -1
        for _ in range(5):
            while stalled != (sent := await tab.evaluate("done")):
                stalled = sent
                await tab.evaluate("session.ping().then(() => 0)")
        assert 0 < stalled < 2 * MIB
        assert await tab.memory() - before < MOST
        ends.may_read.set()
        grown = 0
        while not ends.is_over.is_set():
            grown = max(grown, await tab.memory() - before)
        assert (ends.moved, ends.wrong) == (SIZE, 0)
        assert grown < MOST
        assert resident() - here < MOST
