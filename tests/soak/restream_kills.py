"""A restream server survives `kill -9`: clients stream from it while it is killed at random, again and again.

    python tests/soak/restream_kills.py [--kills 100] [--clients 20] [--seed 1] [--store sqlite:PATH]

The listening socket belongs to this process and is passed on, so clients never meet a closed port and are back at
once. The server's first process stays unused: it imports everything and forks one that works, so a restart takes
milliseconds and the kills come thick. Each client streams one session after the other, with acknowledgements, through
the library's own `ClientEngine`, which verifies ids and checksum; beside it, every message of a session is compared
with what was received before. Any error line, gap, repeat, changed message or wrong checksum ends the run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit import Limits
from muxkit.protocols import restream
from muxkit.protocols.restream.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_COUNT = 3000  # messages of a session
PATIENCE = 120.0  # s for everything that is left after the last kill


# ---------------------------------------------------------------------------- the server


def serve_forks(descriptor: int, store_at: str) -> None:
    """For each line on standard input: one working process; its id is told when it serves."""
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            trio.run(serve, descriptor, store_at)
            os._exit(0)
        os.waitpid(child, 0)


async def serve(descriptor: int, store_at: str) -> None:
    sock = socket.socket(fileno=descriptor)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    async with open_store(store_at, keep=3600.0) as store, trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: restream.serve(
                [listener], store, limits=Limits(half_open=1000), task_status=task_status
            )
        )
        print(os.getpid(), flush=True)


class Server:
    """The process that works, and the one that makes it."""

    def __init__(self, maker: subprocess.Popen[str]) -> None:
        self._maker = maker
        self.working = 0

    async def start(self) -> None:
        assert self._maker.stdin is not None
        assert self._maker.stdout is not None
        self._maker.stdin.write("go\n")
        self._maker.stdin.flush()
        line = await trio.to_thread.run_sync(self._maker.stdout.readline, abandon_on_cancel=True)
        self.working = int(line)

    def kill(self) -> None:
        """It must have been alive."""
        os.kill(self.working, signal.SIGKILL)
        self.working = 0


@contextmanager
def server(store_at: str, listening: socket.socket) -> Iterator[Server]:
    descriptor = listening.fileno()
    command = [sys.executable, __file__, "--serve", str(descriptor), "--store", store_at]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[descriptor]
    ) as maker:
        it = Server(maker)
        try:
            yield it
        finally:
            if it.working:
                it.kill()
            assert maker.stdin is not None
            maker.stdin.close()
            maker.wait()


# ---------------------------------------------------------------------------- the clients


@attrs.define
class Tally:
    """What the clients met."""

    messages: int = 0
    sessions: int = 0
    connections: int = 0
    interruptions: int = 0
    left: int = 0
    errors: list[str] = attrs.field(factory=list)
    over: bool = False


def is_over(engine: restream.ClientEngine) -> bool:
    return engine.state is restream.StreamState.FINISHED


class Reader:
    """A client that streams sessions, one after the other, through whatever happens to its connections."""

    def __init__(
        self, dial: Callable[[], int], dice: random.Random, tally: Tally, *, most_count: int = MOST_COUNT
    ) -> None:
        self.dial = dial
        self.most_count = most_count
        self.dice = dice
        self.tally = tally
        self.seen: dict[int, object] = {}
        self.most_bytes = 65_536  # of one receive

    async def run(self) -> None:
        while not self.tally.over:
            await self._session()
            self.tally.sessions += 1

    async def _session(self) -> None:
        count = self.dice.randrange(1, self.most_count)
        config = restream.ClientConfig(ack_every=self.dice.choice((None, 1, 16, 100)))
        engine = restream.ClientEngine.stateful(restream.new_uuid(), {"count": count}, config=config)
        self.seen = {}
        while not is_over(engine):
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", self.dial())
            except OSError as error:
                raise self._failed(engine, f"the port was closed: {error}") from error
            self.tally.connections += 1
            engine.connection_made(trio.current_time())
            try:
                await self._connection(engine, stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.tally.interruptions += 1
            finally:
                await self.leave(stream)
            engine.connection_lost(trio.current_time())
            self._hear(engine)
        if len(self.seen) != count:
            raise self._failed(engine, f"{len(self.seen)} messages instead of {count}")

    def has_enough(self, *, heard: bool) -> bool:
        """Is this connection to be left, though the session goes on? `heard`: something came on it."""
        return False

    async def leave(self, stream: trio.SocketStream) -> None:
        """The connection is not needed any more."""
        await trio.aclose_forcefully(stream)

    async def _connection(self, engine: restream.ClientEngine, stream: trio.SocketStream) -> None:
        heard = False
        while True:
            for buffer in engine.buffers_to_send(65_536):
                await stream.send_all(buffer)
            if is_over(engine):
                await stream.send_eof()
                return
            if self.has_enough(heard=heard):
                return
            data = await stream.receive_some(self.most_bytes)
            if not data:
                engine.receive_eof(trio.current_time())
                self._hear(engine)
                self.tally.interruptions += not is_over(engine)
                return
            heard = True
            engine.receive_bytes(bytes(data), trio.current_time())
            self._hear(engine)

    def _hear(self, engine: restream.ClientEngine) -> None:
        for event in engine.events():
            match event:
                case restream.Received(id=id, data=data):
                    if id in self.seen:
                        raise self._failed(engine, f"message {id} came twice")
                    self.seen[id] = data
                    engine.taken(event)
                    self.tally.messages += 1
                case restream.Refused(text):
                    raise self._failed(engine, f"the server said: {text}")
                case restream.Failed(error):
                    raise self._failed(engine, str(error))
                case _:
                    pass

    def _failed(self, engine: restream.ClientEngine, what: str) -> AssertionError:
        self.tally.errors.append(what)
        return AssertionError(what)


# ---------------------------------------------------------------------------- the run


async def storm(
    it: Server, port: int, dice: random.Random, *, kills: int, clients: int, most_count: int, say: Callable[[str], None]
) -> Tally:
    """Kill the server so often; gives what the clients met."""
    tally = Tally()
    await it.start()
    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            reader = Reader(lambda: port, random.Random(dice.getrandbits(64)), tally, most_count=most_count)
            nursery.start_soon(reader.run)
        for number in range(1, kills + 1):
            before = tally.messages
            await trio.sleep(dice.uniform(0.0, 0.3))
            while tally.messages == before:  # under load, not in a restart  # noqa: ASYNC110
                await trio.sleep(0.001)
            it.kill()
            if dice.random() < 0.2:
                await trio.sleep(dice.uniform(0.0, 0.2))
            await it.start()
            if number % 10 == 0:
                say(f"{number} kills: {tally.messages:,} messages, {tally.sessions} sessions")
        tally.over = True
        nursery.cancel_scope.deadline = trio.current_time() + PATIENCE
    if nursery.cancel_scope.cancelled_caught:
        tally.errors.append(f"the clients did not finish within {PATIENCE:g} s")
    return tally


def run(
    store_at: str,
    seed: int,
    *,
    kills: int,
    clients: int,
    most_count: int = MOST_COUNT,
    say: Callable[[str], None] = lambda line: None,
) -> Tally:
    with socket.create_server(("127.0.0.1", 0), backlog=clients + 10) as listening:
        port, dice = listening.getsockname()[1], random.Random(seed)
        with server(store_at, listening) as it:

            async def main() -> Tally:
                return await storm(it, port, dice, kills=kills, clients=clients, most_count=most_count, say=say)

            return trio.run(main)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--store")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve_forks(options.serve, options.store)
        return
    print(f"seed {options.seed}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="muxkit-") as folder:
        store = options.store or f"sqlite:{Path(folder, 'sessions.db')}"
        tally = run(
            store, options.seed, kills=options.kills, clients=options.clients, say=lambda line: print(line, flush=True)
        )
    took = time.perf_counter() - began
    print(
        f"{options.kills} kills in {took:.0f} s: {tally.sessions} sessions, {tally.messages:,} messages, "
        f"{tally.connections} connections, {tally.interruptions} of them interrupted; {len(tally.errors)} errors"
    )
    sys.exit(bool(tally.errors))


if __name__ == "__main__":
    main()
