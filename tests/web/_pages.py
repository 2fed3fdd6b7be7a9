"""Web pages of tests: a server that delivers one with the JavaScript client, and what a test asks the page to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from muxkit.protocols import bpmux
from muxkit_web import Pages
from tests.web._chromium import Tab, chromium
from tests.web._lives import SCRIPT, Lives

LIVE = """
import("/lives.mjs").then(({{ live }}) => import("/muxkit.js").then((muxkit) => live(muxkit, {url}, {plans})))
"""


def pages(folder: Path) -> Pages:
    """Make an empty page in a folder, beside the script of the lives."""
    folder.mkdir()
    (folder / "index.html").write_text("<!doctype html><title>a page</title>", encoding="utf-8")
    shutil.copy(SCRIPT, folder)
    return Pages(folder)


def page_at(url: str) -> str:
    """Return the address of the page that a server delivers, whose URL is given."""
    return url.replace("bpmux+ws", "http")


@asynccontextmanager
async def living(folder: Path) -> AsyncIterator[LivingPage]:
    """Open a page in Chromium that can live lives of `_lives.py` with a server."""
    lives: dict[int, Lives] = {}

    async def serve(session: bpmux.Session) -> None:
        assert session.info.request is not None
        await lives[int(session.info.request.query)].serve(session)

    async with (
        bpmux.open_server(serve, "bpmux+ws://127.0.0.1:0", pages=pages(folder / "www")) as server,
        chromium(folder) as browser,
    ):
        tab = await browser.open(page_at(server.url))
        yield LivingPage(tab, server.url.removeprefix("bpmux+"), lives)


class LivingPage:
    """A page that lives lives; made by `living`."""

    def __init__(self, tab: Tab, url: str, lives: dict[int, Lives]) -> None:
        self.tab = tab
        self._url = url
        self._lives = lives

    async def live(self, seeds: Sequence[int]) -> None:
        """Live the sessions of these seeds, all at the same time, and check both ends."""
        async with trio.open_nursery() as nursery:
            for seed in seeds:
                nursery.start_soon(self._live_one, seed)

    async def _live_one(self, seed: int) -> None:
        lives = self._lives[seed] = Lives(seed)
        given = {"url": json.dumps(f"{self._url}/?{seed}"), "plans": json.dumps(lives.theirs)}
        said: dict[str, Any] = await self.tab.evaluate(LIVE.format(**given))
        lives.check_client(said)
        del self._lives[seed]
