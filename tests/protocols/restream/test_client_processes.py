"""Another process continues a stream after one was killed at any message, and gets each message once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.protocols.restream.test_client_cuts import chain, serving

ROOT = Path(__file__).resolve().parents[3]
COUNT = 120

# The messages and the snapshot are saved as one; only then the server may delete them.
PROGRAM = """
import json, os, sys, trio
from muxkit.protocols import restream

url, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])

async def main():
    try:
        with open(path) as file:
            values, saved = json.load(file)
        again = {"resume": saved}
    except FileNotFoundError:
        values, again = [], {"count": count}
    config = restream.ClientConfig(ack_every=None)
    async with restream.numbers(url, config=config, **again) as numbers:
        async for number in numbers:
            values.append(number)
            with open(path + ".new", "w") as file:
                json.dump([values, numbers.snapshot()], file)
            os.replace(path + ".new", path)
            numbers.acknowledge()
            print(number, flush=True)

trio.run(main)
"""


@pytest.mark.requirement("R-51")
@pytest.mark.seeds(1, soak=100)
async def test_killed_at_any_message_it_has_every_number_once(seed: int, tmp_path: Path) -> None:
    dice, path, kills = random.Random(seed), tmp_path / "state", 3
    async with serving() as running:
        for run in range(kills + 1):
            command = [sys.executable, "-c", PROGRAM, running.url, str(path), str(COUNT)]
            start = partial(trio.run_process, command, stdout=subprocess.PIPE, check=False, cwd=ROOT)
            async with trio.open_nursery() as nursery:
                process: trio.Process = await nursery.start(partial(start, capture_stdout=False))
                assert process.stdout is not None
                left = dice.randrange(1, 30) if run < kills else COUNT * 20
                while left > 0 and (data := await process.stdout.receive_some()):
                    left -= data.count(b"\n")
                if run < kills:
                    process.kill()
        status = await running.store.status(json.loads(path.read_text())[1]["uuid"])
    values, saved = json.loads(path.read_text())
    assert values == chain(COUNT)
    assert (saved["id"], saved["finished"]) == (COUNT, True)
    assert status.head == COUNT
