"""After the storing process is killed at any moment, all that it confirmed is there."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import trio

from tests.protocols.restream.stores import Clock, Place, next_number, numbers
from tests.protocols.restream.stores_servers import ask

if TYPE_CHECKING:
    from pathlib import Path

pytest_plugins = ["tests.protocols.restream._postgres", "tests.protocols.restream.stores_fixtures"]

SESSIONS = 8

SERVER = """
import sys, trio
from muxkit.protocols.restream.store import SessionExists
from muxkit.protocols.restream.store import open_store
from tests.protocols.restream.stores import Numbers, Number, next_number

async def main():
    async with open_store(sys.argv[1], Numbers, Number, keep=3600) as store:
        async def one(uuid):
            try:
                await store.register(uuid, Numbers(10**9))
            except SessionExists:
                pass
            epoch = (await store.attach(uuid)).epoch
            while True:
                made = await store.put_many(uuid, next_number, 3, epoch=epoch)
                print(uuid, made[-1].id, flush=True)
                if made[-1].id % 4 == 0:
                    await store.ack(uuid, made[-1].id - 2, epoch=epoch)
        async with trio.open_nursery() as nursery:
            for n in range(int(sys.argv[2])):
                nursery.start_soon(one, f"session-{n}")

trio.run(main)
"""


@pytest.mark.requirement("R-54")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.seeds(1, soak=100)
def test_what_a_killed_process_said_was_stored_is_stored(
    seed: int, kind: str, quick_path: Path, request: pytest.FixtureRequest
) -> None:
    where = request.getfixturevalue("schema") if kind == "postgres" else f"sqlite:{quick_path}"
    luck = random.Random(seed)
    told: dict[str, int] = {}
    for _ in range(2):
        run_and_kill(where, luck.randrange(300), told)
    if kind == "postgres":
        until_nobody_works_for_the_dead(where)
    trio.run(look, where, told)


def run_and_kill(where: str, lines: int, told: dict[str, int]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, where, str(SESSIONS)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        for _ in range(lines):
            note(server.stdout.readline(), told)
        assert server.poll() is None
        server.kill()
        for line in server.stdout:
            note(line, told)


def until_nobody_works_for_the_dead(where: str) -> None:
    """Wait until the database has done what it received before the kill."""
    while ask(where, "SELECT pid FROM pg_stat_activity WHERE application_name = 'muxkit restream'"):
        time.sleep(0.01)


def note(line: str, told: dict[str, int]) -> None:
    if line.endswith("\n"):  # the last one may be torn
        uuid, id = line.split()
        assert int(id) > told.get(uuid, 0), "an id came twice"
        told[uuid] = int(id)


async def look(where: str, told: dict[str, int]) -> None:
    clock = Clock()
    clock.now = 0  # the killed process used the real clock: nothing expires for a long time
    async with Place(where, clock).open() as store:
        for uuid, head in told.items():
            status = await store.status(uuid)
            assert status.head >= head
            kept = await store.replay(uuid, status.acknowledged, 10_000)
            assert kept == numbers(*range(status.acknowledged + 1, status.head + 1))
            assert await store.put(uuid, next_number) == numbers(status.head + 1)[0]
