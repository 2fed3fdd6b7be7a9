"""What a store reads for one call depends on the answer, and not on what else is kept: counted in steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from muxkit.pipeline.staging import rows as staging_rows
from muxkit.pipeline.staging import store as staging_store
from muxkit.protocols.restream.store import SessionStore, StoreLimits, open_store
from muxkit.protocols.restream.store import memory as memory_store
from muxkit.protocols.restream.store import postgres as postgres_store
from muxkit.protocols.restream.store.memory import KeptMessages
from muxkit.protocols.restream.store.rules import KEEP, Codec, Rules
from muxkit.protocols.restream.store.sqlite import open_sqlite
from muxkit.protocols.restream.wire import StoredMessage
from muxkit.storage import sqlite
from tests.protocols.restream.stores import U1, Clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytest_plugins = ["tests.protocols.restream.stores_fixtures", "tests.protocols.restream._postgres"]


class CountedList(list[Any]):
    """A list that counts the places that are read."""

    steps = 0

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        found = super().__getitem__(index)
        CountedList.steps += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            CountedList.steps += 1
            yield each


def steps_of(act: Any) -> int:  # noqa: ANN401
    before = CountedList.steps
    act()
    return CountedList.steps - before


def kept(count: int) -> KeptMessages:
    messages = KeptMessages()
    messages._rows = CountedList()
    messages.extend([StoredMessage(id, None, b"x") for id in range(1, count + 1)])
    return messages


@pytest.mark.parametrize("after", [0, 50_000, 99_900])
def test_a_batch_costs_the_same_wherever_it_is_in_what_memory_keeps(after: int) -> None:
    messages = kept(100_000)
    assert steps_of(lambda: messages.after(after, 100, 1 << 20)) == 100


def test_reading_and_acknowledging_everything_costs_a_few_steps_for_each_message() -> None:
    messages = kept(100_000)

    def read_all() -> None:
        done = 0
        while batch := messages.after(done, 100, 1 << 20):
            assert [row.id for row in batch] == list(range(done + 1, done + 101))
            done = batch[-1].id
            assert [row.id for row in messages.trim(done)] == [row.id for row in batch]

    assert steps_of(read_all) < 3 * 100_000


def test_kept_messages_are_those_that_were_added_and_not_deleted() -> None:
    messages = kept(10)
    assert [row.id for row in messages.trim(3)] == [1, 2, 3]
    assert messages.trim(2) == []
    assert [row.id for row in messages.after(0, 3, 1 << 20)] == [4, 5, 6]
    assert [row.id for row in messages.after(5, 100, 1)] == [6]
    messages.extend([StoredMessage(11, None, b"x")])
    assert [row.id for row in messages.clear()] == list(range(4, 12))
    messages.extend([StoredMessage(12, None, b"x")])
    assert [row.id for row in messages.after(11, 100, 1)] == [12]


async def test_a_page_and_a_sweep_of_memory_do_not_walk_over_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: Counter[str] = Counter()

    class CountedSessions(dict[str, Any]):
        def __getitem__(self, uuid: str) -> Any:  # noqa: ANN401
            looked["one"] += 1
            return super().__getitem__(uuid)

        def values(self) -> Any:  # noqa: ANN401
            looked["all"] += 1
            return super().values()

    clock = Clock()
    async with open_store("memory:", now=clock) as store:
        backend: Any = store._backend
        assert isinstance(backend, memory_store._Memory)
        backend._sessions = CountedSessions()
        backend._order = CountedList()
        for number in range(2000):
            await store.register(f"session {number:04}", 0, attached=number >= 10)
        looked.clear()
        before = CountedList.steps
        page = await store.sessions(after="session 1800", most=5)
        assert [status.uuid for status in page] == [f"session {number}" for number in range(1801, 1806)]
        assert CountedList.steps - before < 50  # a binary search, and five sessions
        assert looked["one"] == 5
        clock.now += 2 * KEEP
        assert await store.expire() == 10
        assert looked["all"] == 0


class Planned:
    """A connection that notes the plans of the statements that read or change rows."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite.StandardConnection(path)
        self.version = self._connection.version
        self.sync_names = self._connection.sync_names
        self.close = self._connection.close
        self.plans: dict[str, list[str]] = {}
        self.times: Counter[str] = Counter()

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def run(self, sql: str, values: Sequence[sqlite.Value] = (), /) -> list[tuple[sqlite.Value, ...]]:
        self._note(sql, values)
        return self._connection.run(sql, values)

    def run_many(self, sql: str, values: Sequence[Sequence[sqlite.Value]], /) -> None:
        self._connection.run_many(sql, values)

    def _note(self, sql: str, values: Sequence[sqlite.Value]) -> None:
        self.times[sql] += 1
        if sql.startswith(("SELECT", "UPDATE", "DELETE", "INSERT")) and sql not in self.plans:
            found = self._connection.run(f"EXPLAIN QUERY PLAN {sql}", values)
            self.plans[sql] = [str(row[-1]) for row in found]

    def scans(self) -> list[str]:
        """Return the statements that walk over a whole table, or sort what they find."""
        return [sql for sql, plan in self.plans.items() if any("SCAN" in step or "TEMP" in step for step in plan)]


COUNTS = "SELECT count(*) FROM sessions"


async def test_no_statement_of_a_sqlite_store_walks_over_a_table(quick_path: Path) -> None:
    clock = Clock()
    connections: list[Planned] = []

    def connect(path: Path) -> Planned:
        connections.append(Planned(path))
        return connections[-1]

    rules = Rules(Codec(object, object), StoreLimits(), KEEP, clock)
    async with open_sqlite(quick_path, rules, connect=connect) as store:
        connections[0].plans.clear()  # opening walks over everything once
        await use_everything(store)
        clock.now += 2 * KEEP
        await store.expire()
        for number in range(10):
            await store.register(f"another {number}", 0)
    (connection,) = connections
    assert connection.scans() == [COUNTS]
    assert connection.times[COUNTS] == 1  # when the first session is made, and not for each of them


async def use_everything(store: SessionStore[Any, Any]) -> None:
    await store.register(U1, 0)
    await store.put_many(U1, lambda state: (state, state), 10)
    await store.append_many(U1, list(range(50)))
    await store.replay(U1, 5, 20)
    await store.ack(U1, 3)
    await store.advance(U1, "one", 5)
    await store.remove_reader(U1, "one")
    await store.status(U1)
    await store.statuses([U1])
    await store.sessions()
    await store.attach(U1)
    await store.finish(U1)
    await store.disconnect(U1)
    await store.touch(U1)


POSTGRES_READS = {
    "page": (postgres_store.PAGE, ("", 0.0, 10)),
    "load": (postgres_store.LOAD, (["u00001", "u00002"],)),
    "overdue": (postgres_store.OVERDUE, (5.0, 10)),
    "messages": (postgres_store.MESSAGES, ([0], ["u00001"], [50], [10], [1000])),
    "trim": (postgres_store.TRIM, (["u00001"], [0], [5])),
}


@pytest.mark.parametrize("name", POSTGRES_READS)
async def test_no_statement_of_a_postgres_store_walks_over_a_table(schema: str, name: str) -> None:
    sql, values = POSTGRES_READS[name]
    async with open_store(schema):
        await trio.to_thread.run_sync(check_plan, schema, sql, values)


def check_plan(schema: str, sql: str, values: tuple[object, ...]) -> None:
    with psycopg.connect(schema, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO restream_sessions "
            "(uuid, params, state, head, acknowledged, final, fed, epoch, due, incarnation, readers, written, marks) "
            "SELECT 'u' || lpad(n::text, 5, '0'), '', '', 0, 0, false, false, 0, n, '', '', 0, '' "
            "FROM generate_series(1, 20000) AS n"
        )
        connection.execute(
            "INSERT INTO restream_messages SELECT 'u' || lpad((n % 100)::text, 5, '0'), n, NULL, '' "
            "FROM generate_series(1, 20000) AS n"
        )
        connection.execute("ANALYZE restream_sessions, restream_messages")
        plan = "\n".join(row[0] for row in connection.execute(f"EXPLAIN {sql}", values))
    assert "Seq Scan" not in plan, plan
    assert "Index" in plan or "Bitmap" in plan, plan


@pytest.mark.parametrize(
    "condition",
    [staging_store.STAGED, staging_store.PUBLISHED, staging_store.PASSED, "due IS NOT NULL AND due <= ? LIMIT ?"],
)
def test_no_condition_of_a_staging_store_walks_over_a_table(condition: str, quick_path: Path) -> None:
    connection = sqlite.StandardConnection(quick_path)
    for statement in staging_rows.MIGRATIONS[0]:
        connection.run(statement)
    sql = f"SELECT * FROM staging_transactions WHERE {condition}"
    plan = [str(row[-1]) for row in connection.run(f"EXPLAIN QUERY PLAN {sql}", (0,) * condition.count("?"))]
    connection.close()
    assert plan
    assert not [step for step in plan if "SCAN" in step or "TEMP" in step]


def test_trimming_a_staging_stream_ends_at_the_first_transaction_that_is_kept(quick_path: Path) -> None:
    connection = sqlite.StandardConnection(quick_path)
    for statement in staging_rows.MIGRATIONS[0]:
        connection.run(statement)
    plan = connection.run(
        f"EXPLAIN QUERY PLAN SELECT * FROM staging_transactions WHERE {staging_store.PASSED}", ("s", 5, 5, 100)
    )
    connection.close()
    assert "(stream=? AND base>? AND base<?)" in str(plan[0][-1])
