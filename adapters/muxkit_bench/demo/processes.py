"""The server and the client process of the demo: echo channels and one bulk channel on one connection, and pings.

`python -m muxkit_bench.demo.processes server tcp` and `... client URL PLAN` print what happens as lines of JSON, the
result as the last of them. Each ends when its standard input is closed.
"""

from __future__ import annotations

import math
import os
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import trio

import muxkit
from muxkit.cli.terminal import CommandFailed, Exit, failure_of

BATCH = 16  # bulk messages that are sent together
ECHO_PAUSE = 0.01  # s, between two echoes of a channel
PING_PAUSE = 0.005  # s, between two pings
PROGRESS_PAUSE = 0.1  # s, between two lines
SAMPLES_MOST = 10_000  # round trips that are kept; of more a random sample
PROBLEMS_MOST = 5  # problems that are kept
INDEX = 8  # bytes; each message begins with its number
STEP = 7919  # bytes between two messages in the block of a seed; a prime, so that they seldom repeat
ECHO_SIZES = (16, 64, 9, 256, 100, 1024, 512, 8)  # bytes
BULK_SIZES = (65_536,)
STATUS = Path("/proc/self/status")


# ---------------------------------------------------------------------------- what the command is told


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The orders of the client; times in seconds."""

    seconds: float
    """Time under load."""
    idle_seconds: float
    """Time before that, with all channels open and idle."""
    channels: int = 100
    seed: int = 1
    patience: float = 30.0
    """Extra time that the whole run may take."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The server listens."""

    url: str


class Progress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The progress of the client."""

    phase: Literal["idle", "load"]
    elapsed: float
    messages: int
    bytes: int
    ping: float | None
    """The last round trip, in seconds."""


class Totals(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The result of one end: the last line of a process that did its work."""

    messages_sent: int
    bytes_sent: int
    messages_verified: int
    """How many messages from the other end were verified."""
    bytes_verified: int
    problems: list[str]
    memory: int | None
    """The highest resident memory, in bytes."""
    seconds: float | None = None
    """How long the load lasted, until the last byte was confirmed."""
    idle_pings: list[float] = []
    """Round trips, as in the two lists below; a sample if there are more than `SAMPLES_MOST`."""
    load_pings: list[float] = []
    echoes: list[float] = []


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last line of a process that could not do its work."""

    sentence: str
    exit: Exit


Event = Ready | Progress | Totals | Failed

_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def tell(event: Event) -> None:
    """Write a line; a closed pipe is ignored."""
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()


def understand(line: bytes) -> Event:
    return _events.decode(line)


# ---------------------------------------------------------------------------- what both ends send and check


class Order(msgspec.Struct, frozen=True):
    """The first message of a channel: its job, and the seed of its contents."""

    job: Literal["echo", "bulk"]
    channel: int
    seed: int


class Receipt(msgspec.Struct, frozen=True):
    """The last message of the server on a channel: what it had received when the client had finished."""

    messages: int
    bytes: int


class Payloads:
    """The messages of one direction of one channel: the same seed and sizes give the same messages."""

    def __init__(self, seed: int, sizes: Sequence[int]) -> None:
        if min(sizes) < INDEX:
            raise ValueError(f"sizes={sizes}: a message holds its number, {INDEX} bytes")
        self._sizes = sizes
        self._room = 2 * max(sizes)
        self._block = random.Random(seed).randbytes(self._room + max(sizes))

    def message(self, number: int) -> bytes:
        start = number * STEP % self._room
        size = self._sizes[number % len(self._sizes)] - INDEX
        return number.to_bytes(INDEX, "big") + self._block[start : start + size]


class Samples:
    """Keeps up to `SAMPLES_MOST` values; of more a uniform random sample."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        self._seen = 0
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self._seen += 1
        if len(self.kept) < SAMPLES_MOST:
            self.kept.append(value)
        elif (place := self._random.randrange(self._seen)) < SAMPLES_MOST:
            self.kept[place] = value


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Return the smallest sample that so many percent of all do not exceed."""
    if not samples:
        return None
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


class End:
    """One end of a run: what it has sent, and what was right and what was wrong of what came."""

    def __init__(self) -> None:
        self.messages_sent = 0
        self.bytes_sent = 0
        self.messages_verified = 0
        self.bytes_verified = 0
        self.problems: list[str] = []

    def sent(self, messages: int, size: int) -> None:
        self.messages_sent += messages
        self.bytes_sent += size

    def check(self, where: str, number: int, came: bytes, expected: bytes) -> None:
        """Compare the `number`th message of a channel with the one that the seed gives."""
        if came == expected:
            self.messages_verified += 1
            self.bytes_verified += len(came)
        else:
            self.note(f"{where}, message {number}: {_difference(came, expected)}")

    def note(self, problem: str) -> None:
        if len(self.problems) < PROBLEMS_MOST:
            self.problems.append(problem)

    def totals(self) -> Totals:
        return Totals(
            messages_sent=self.messages_sent,
            bytes_sent=self.bytes_sent,
            messages_verified=self.messages_verified,
            bytes_verified=self.bytes_verified,
            problems=self.problems,
            memory=peak_memory(),
        )


def _difference(came: bytes, expected: bytes) -> str:
    if came[:INDEX] != expected[:INDEX]:
        return f"number {int.from_bytes(came[:INDEX], 'big')} came in its place, {len(came)} bytes"
    if len(came) != len(expected):
        return f"{len(came)} bytes came, not {len(expected)}"
    first = next(position for position, (one, other) in enumerate(zip(came, expected, strict=True)) if one != other)
    return f"it differs from byte {first} of {len(expected)} on"


# ---------------------------------------------------------------------------- the server


class Server(End):
    """The handlers of all channels."""

    async def serve_channel(self, channel: muxkit.Channel) -> None:
        order = msgspec.json.decode(await channel.receive(), type=Order)
        receipt = await (self._echo(channel, order) if order.job == "echo" else self._take(channel, order))
        await channel.send(msgspec.json.encode(receipt))

    async def _echo(self, channel: muxkit.Channel, order: Order) -> Receipt:
        payloads, where = Payloads(order.seed, ECHO_SIZES), f"echo channel {order.channel}"
        number = size = 0
        async for message in channel:
            self.check(where, number, message, payloads.message(number))
            await channel.send(message)
            number += 1
            size += len(message)
            self.sent(1, len(message))
        return Receipt(number, size)

    async def _take(self, channel: muxkit.Channel, order: Order) -> Receipt:
        payloads = Payloads(order.seed, BULK_SIZES)
        number = size = 0
        with suppress(trio.EndOfChannel):
            while True:
                for message in await channel.receive_many():
                    self.check("bulk channel", number, message, payloads.message(number))
                    number += 1
                    size += len(message)
        return Receipt(number, size)


async def serve(transport: str) -> Totals:
    if transport != "unix":
        return await _serve(f"bpmux+{transport}://127.0.0.1:0")
    # This process owns the folder, so that it is removed however the parent ends.
    with tempfile.TemporaryDirectory(prefix="muxkit-") as folder:
        return await _serve(f"bpmux+unix://{Path(folder, 'demo')}")


async def _serve(url: str) -> Totals:
    server = Server()
    async with trio.open_nursery() as nursery:
        served: muxkit.Server = await nursery.start(muxkit.serve, muxkit.each_channel(server.serve_channel), url)
        tell(Ready(served.url))
        await until_released()
        nursery.cancel_scope.cancel()
    return server.totals()


# ---------------------------------------------------------------------------- the client


class Client(End):
    """One run of the demo."""

    def __init__(self, session: muxkit.Session, plan: Plan) -> None:
        super().__init__()
        self._session = session
        self._plan = plan
        self._begin = trio.Event()
        self._is_over = False
        self._opened_at = trio.current_time()
        self._began_at = 0.0
        self._idle_pings = Samples()
        self._load_pings = Samples()
        self._echoes = Samples()
        self._last_ping: float | None = None

    async def run(self) -> Totals:
        """Open all channels, wait while they are idle, then let all of them work at once."""
        async with trio.open_nursery() as beside:
            beside.start_soon(self._ping)
            beside.start_soon(self._tell_progress)
            async with trio.open_nursery() as channels:
                await channels.start(self._bulk, Order("bulk", 0, self._plan.seed))
                for number in range(1, self._plan.channels + 1):
                    await channels.start(self._echo, Order("echo", number, self._plan.seed + number))
                await trio.sleep(self._plan.idle_seconds)
                self._began_at = trio.current_time()
                self._begin.set()
                await trio.sleep(self._plan.seconds)
                self._is_over = True
            seconds = trio.current_time() - self._began_at
            beside.cancel_scope.cancel()
        return msgspec.structs.replace(
            self.totals(),
            seconds=seconds,
            idle_pings=self._idle_pings.kept,
            load_pings=self._load_pings.kept,
            echoes=self._echoes.kept,
        )

    # --- the channels

    async def _echo(self, order: Order, task_status: trio.TaskStatus[None]) -> None:
        payloads, where = Payloads(order.seed, ECHO_SIZES), f"echo channel {order.channel}"
        number = size = 0
        async with self._session.open() as channel:
            await self._announce(channel, order, task_status)
            await trio.sleep(ECHO_PAUSE * order.channel / self._plan.channels)  # spreads the echoes over time
            while not (self._is_over and number):
                message = payloads.message(number)
                sent_at = trio.current_time()
                await channel.send(message)
                answer = await channel.receive()
                self._echoes.add(trio.current_time() - sent_at)
                self.check(where, number, answer, message)
                number += 1
                size += len(message)
                self.sent(1, len(message))
                await trio.sleep(ECHO_PAUSE)
            await self._confirm(channel, where, number, size)

    async def _bulk(self, order: Order, task_status: trio.TaskStatus[None]) -> None:
        payloads = Payloads(order.seed, BULK_SIZES)
        number = size = 0
        async with self._session.open() as channel:
            await self._announce(channel, order, task_status)
            while not self._is_over:
                batch = [payloads.message(number + place) for place in range(BATCH)]
                await channel.send_many(batch)
                batch_size = sum(map(len, batch))
                number += BATCH
                size += batch_size
                self.sent(BATCH, batch_size)
            await self._confirm(channel, "bulk channel", number, size)

    async def _announce(self, channel: muxkit.Channel, order: Order, task_status: trio.TaskStatus[None]) -> None:
        await channel.send(msgspec.json.encode(order))
        task_status.started()
        await self._begin.wait()

    async def _confirm(self, channel: muxkit.Channel, where: str, number: int, size: int) -> None:
        """Finish the channel, and compare with the server's receipt, which must be its last message."""
        await channel.finish()
        receipt = msgspec.json.decode(await channel.receive(), type=Receipt)
        if (receipt.messages, receipt.bytes) != (number, size):
            self.note(
                f"{where}: {number} messages of {size} bytes were sent, "
                f"{receipt.messages} of {receipt.bytes} bytes were received"
            )
        async for message in channel:
            self.note(f"{where}: {len(message)} bytes came after the receipt")

    # --- pings and progress

    async def _ping(self) -> None:
        while True:
            self._last_ping = took = await self._session.ping()
            (self._load_pings if self._begin.is_set() else self._idle_pings).add(took)
            await trio.sleep(PING_PAUSE)

    async def _tell_progress(self) -> None:
        while True:
            began = self._began_at or self._opened_at
            tell(
                Progress(
                    phase="load" if self._began_at else "idle",
                    elapsed=trio.current_time() - began,
                    messages=self.messages_sent + self.messages_verified,
                    bytes=self.bytes_sent + self.bytes_verified,
                    ping=self._last_ping,
                )
            )
            await trio.sleep(PROGRESS_PAUSE)


async def measure(url: str, plan: Plan) -> Totals:
    """Connect and run, within the time of the plan."""
    limit = plan.idle_seconds + plan.seconds + plan.patience
    with trio.move_on_after(limit):
        async with AsyncExitStack() as stack:
            try:
                session = await stack.enter_async_context(muxkit.connect(url))
            except OSError as error:  # only a failure to connect has the exit code for that
                raise CommandFailed(f"could not connect to {url}: {error}", Exit.NOT_CONNECTED) from error
            return await Client(session, plan).run()
    raise trio.TooSlowError(f"the run was not over after {limit:g} s")


async def measure_while_wanted(url: str, plan: Plan) -> Totals | None:
    """Measure until the parent process closes standard input; then the result is None."""
    totals: Totals | None = None
    async with trio.open_nursery() as nursery:

        async def leave() -> None:
            await until_released()
            nursery.cancel_scope.cancel()

        nursery.start_soon(leave)
        totals = await measure(url, plan)
        nursery.cancel_scope.cancel()
    return totals


# ---------------------------------------------------------------------------- the processes


def run_part(part: Callable[[], Awaitable[Totals | None]]) -> Exit:
    """Run `part` and report its result; None means that the parent ended it before."""
    try:
        totals = trio.run(part)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        tell(Failed(failure.sentence, failure.exit))
        return failure.exit
    if totals is None:
        return Exit.INTERRUPTED
    tell(totals)
    return Exit.OK


async def until_released() -> None:
    """Wait for the end of standard input: the parent has closed it, or has ended."""
    # Not `sys.stdin.read`: its thread, once abandoned, would hold a lock when the interpreter ends.
    while await trio.to_thread.run_sync(os.read, 0, 1024, abandon_on_cancel=True):
        pass


def peak_memory() -> int | None:
    """Return the highest resident memory in bytes; None where the system does not report it."""
    if STATUS.exists():
        # Not `ru_maxrss`: on Linux a new process inherits that from the one that started it.
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server", transport]:
            sys.exit(run_part(partial(serve, transport)))
        case ["client", url, plan]:
            sys.exit(run_part(partial(measure_while_wanted, url, msgspec.json.decode(plan, type=Plan))))
