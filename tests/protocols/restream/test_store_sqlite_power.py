"""After a power cut at any moment, all that the store confirmed is there."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

import attrs
import pytest
import trio

from muxkit.protocols.restream.store import UnknownSession
from muxkit.protocols.restream.store.sqlite import open_sqlite
from muxkit.storage import StoreError
from tests.protocols.restream.stores import Clock, Numbers, NumberStore, next_number, numbers, rules
from tests.protocols.restream.stores_disk import Disk, PowerCut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from muxkit.storage.sqlite import Connection, Value

Journal = Literal["wal", "delete"]

SESSIONS = 4
OPERATIONS = 500  # of the disk: more than the longest of these runs needs


@attrs.define
class Told:
    """What the store confirmed."""

    sessions: set[str] = attrs.field(factory=set)
    heads: dict[str, int] = attrs.field(factory=dict)
    acks: dict[str, int] = attrs.field(factory=dict)


async def work_until_the_lights_go_out(store: NumberStore, seed: int, told: Told) -> None:
    async def one(uuid: str) -> None:
        luck = random.Random(f"{seed} {uuid}")
        try:
            epoch = (await store.register(uuid, Numbers(10**9))).epoch
            told.sessions.add(uuid)
            told.heads[uuid] = told.acks[uuid] = 0
            for _ in range(40):
                match luck.randrange(8):
                    case 0 if told.heads[uuid] > told.acks[uuid]:
                        upto = luck.randint(told.acks[uuid] + 1, told.heads[uuid])
                        await store.ack(uuid, upto, epoch=epoch)
                        told.acks[uuid] = upto
                    case 1:
                        told.heads[uuid] = (await store.put_many(uuid, next_number, luck.randint(1, 20)))[-1].id
                    case 2:
                        await store.disconnect(uuid)
                        epoch = (await store.attach(uuid)).epoch
                    case _:
                        told.heads[uuid] = (await store.put(uuid, next_number, epoch=epoch)).id
        except StoreError:
            pass

    async with trio.open_nursery() as nursery:
        for n in range(SESSIONS):
            nursery.start_soon(one, f"session-{n}")


async def cut_and_look(
    seed: int, journal: Journal, path: Path, connection: Callable[[Connection], Connection]
) -> list[str]:
    """Run once with one cut; return what was lost, in words."""
    luck = random.Random(seed)
    disk = Disk(PowerCut(luck.randrange(OPERATIONS)))
    told = Told()
    lost: list[str] = []
    try:
        async with open_sqlite(
            path, rules(Clock()), connect=lambda path: connection(disk.connect(path)), journal=journal
        ) as store:
            await work_until_the_lights_go_out(store, seed, told)
    except StoreError:
        pass  # the cut came while it was opened
    after = disk.survive(luck)
    disk.unplug()
    try:
        async with open_sqlite(path, rules(Clock()), connect=after.connect, journal=journal) as store:
            for uuid in told.sessions:
                lost += await look_at(store, uuid, told)
    except StoreError as error:
        lost.append(f"the store: {error}")
    after.unplug()
    return lost


async def look_at(store: NumberStore, uuid: str, told: Told) -> list[str]:
    try:
        status = await store.status(uuid)
    except UnknownSession:
        return [f"{uuid} is gone"]
    lost: list[str] = []
    if status.head < told.heads[uuid] or status.acknowledged < told.acks[uuid]:
        lost.append(f"{uuid}: {status} after {told.heads[uuid]} and ack {told.acks[uuid]} were said to be stored")
    kept = await store.replay(uuid, status.acknowledged, 10_000)
    if kept != numbers(*range(status.acknowledged + 1, status.head + 1)):
        lost.append(f"{uuid}: what is stored is not what was made")
    if await store.put(uuid, next_number) != numbers(status.head + 1)[0]:
        lost.append(f"{uuid}: the state does not belong to message {status.head}")
    return lost


@pytest.mark.requirement("R-53")
@pytest.mark.clause("restream-G04", "restream-N09", "restream-A05")
@pytest.mark.seeds(32, soak=2000)
async def test_nothing_that_was_stored_is_lost_when_the_power_goes(seed: int, tmp_path: Path) -> None:
    journal: Journal = "wal" if seed % 2 else "delete"
    connection = with_a_short_log if seed % 4 == 1 else plain
    assert await cut_and_look(seed, journal, tmp_path / "sessions.db", connection) == []


def plain(connection: Connection) -> Connection:
    return connection


def with_a_short_log(connection: Connection) -> Connection:
    """A connection whose log starts again every few commits, so that cuts happen there too."""
    connection.run("PRAGMA wal_autocheckpoint = 12")
    return connection


class Lax:
    """A connection that only pretends to sync each commit."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.version = connection.version
        self.close = connection.close
        self.run_many = connection.run_many
        self.sync_names = connection.sync_names

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def run(self, sql: str, values: Sequence[Value] = (), /) -> list[tuple[Value, ...]]:
        if sql == "PRAGMA synchronous":
            return [(2,)]
        return self._connection.run("PRAGMA synchronous = NORMAL" if "synchronous =" in sql else sql, values)


@pytest.mark.requirement("R-53")
async def test_the_simulation_would_notice_a_store_that_does_not_sync(tmp_path: Path) -> None:
    losses = [await cut_and_look(seed, "wal", tmp_path / f"{seed}.db", Lax) for seed in range(12)]
    assert sum(map(bool, losses)) >= 4
