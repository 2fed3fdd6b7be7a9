"""Random lives of channels and requests between Node and Python, opened by both sides at the same time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from muxkit.protocols import bpmux
from tests.web._lives import SCRIPT, Lives

if TYPE_CHECKING:
    from tests.web._node import Node

LIVE = """
const { live } = await import(args[2]);
say(await live(muxkit, args[0], JSON.parse(args[1])));
"""


@pytest.mark.seeds(12, soak=1000)
async def test_random_lives_between_node_and_python_are_byte_exact(node: Node, seed: int) -> None:
    lives = Lives(seed)
    async with bpmux.open_server(lives.serve, "bpmux+ws://127.0.0.1:0") as server:
        url = server.url.removeprefix("bpmux+")
        [said] = await node.run(LIVE, url, json.dumps(lives.theirs), SCRIPT.as_uri())
    lives.check_client(said)
