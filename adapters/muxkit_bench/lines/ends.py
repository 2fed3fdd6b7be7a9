"""The server and the client of `muxkit bench --rtt`, a process each, with a relay between them.

`python -m muxkit_bench.lines.ends server bpmux+tcp FOLDER` prints its URL. `... client URL PLAN` prints what it found.
Both print JSON, and end when their standard input is closed. The name of a channel says what the server does with it:

- `echo` sends each message back.
- `bulk` takes everything, and tells at the end at which rate the second half of the time brought it.
- `stall` takes a MiB, and then nothing more.
"""

from __future__ import annotations

import ssl
import statistics
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

import attrs
import msgspec
import trio

import muxkit
from muxkit.cli.terminal import Exit, failure_of
from muxkit_bench.contestants.certified import options
from muxkit_bench.demo.processes import Failed, Ready, peak_memory, until_released
from muxkit_bench.lines.trips import Connect, count_round_trips, round_trip

MIB: Final = 1024 * 1024
MESSAGE: Final = 64 * 1024  # bytes of a bulk message
KEYSTROKE: Final = 64  # bytes
KEYSTROKE_PAUSE: Final = 0.05  # s
STALLS_AFTER: Final = 1 * MIB
IDLE_KEYSTROKES: Final = 5  # on the idle session
TRIES: Final = 3  # sessions whose round trips are counted; the least counts
PATIENCE: Final = 60.0  # s beyond what the plan needs


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The orders of the client."""

    seconds: float
    """How long bulk is sent, for each number of channels."""
    channels: tuple[int, ...]
    folder: str
    """Where the certificate is."""


class Bulk(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of channels carried at the same time."""

    channels: int
    rate: float
    """Bytes a second, of the second half of the time."""
    keystroke: float
    """The round trip of a short message beside them, in seconds, the median."""
    client_memory: int | None
    server_memory: int | None
    beside_stalled: bool = False


class Found(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What the client found; times in seconds."""

    session: float
    """From the begin to the first answer on a channel of a new session."""
    small: float
    """A new channel, with 1 KB there and back."""
    large: float
    """The same with 100 KB."""
    leaving: float
    keystroke: float
    """The round trip of a short message on an idle session, the median."""
    bulk: list[Bulk]


class Receipt(msgspec.Struct, frozen=True):
    """What the server took of a bulk channel."""

    rate: float
    memory: int | None


Event = Ready | Found | Failed
_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def tell(event: Event) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def understand(line: bytes) -> Event:
    return _events.decode(line)


# ---------------------------------------------------------------------------- the server


async def serve(scheme: str, folder: str) -> None:
    """Serve until the parent process closes standard input."""
    url = f"{scheme}://127.0.0.1:0"
    async with trio.open_nursery() as nursery:
        handler = muxkit.each_channel(_handle)
        server: muxkit.Server = await nursery.start(
            partial(muxkit.serve, handler, url, **options(url, ssl.Purpose.CLIENT_AUTH, folder))
        )
        tell(Ready(server.url))
        await until_released()
        nursery.cancel_scope.cancel()


async def _handle(channel: muxkit.Channel) -> None:
    with suppress(muxkit.LinkLost, trio.EndOfChannel, muxkit.ChannelCancelled, muxkit.ChannelStopped):
        if channel.name == "bulk":
            await _take_bulk(channel)
        elif channel.name == "stall":
            taken = 0
            while taken < STALLS_AFTER:
                taken += len(await channel.receive())
            await trio.sleep_forever()
        else:
            async for message in channel:
                await channel.send(message)


async def _take_bulk(channel: muxkit.Channel) -> None:
    seconds = float(await channel.receive())
    began = trio.current_time()
    counted, counted_from, last = 0, began + seconds / 2, began
    async for message in channel:
        now = trio.current_time()
        if now >= counted_from:
            counted += len(message)
            last = now
    rate = counted / (last - counted_from) if last > counted_from else 0.0
    await channel.send(msgspec.json.encode(Receipt(rate, peak_memory())))


# ---------------------------------------------------------------------------- the client


async def measure(url: str, plan: Plan) -> Found:
    """Measure everything that the plan asks for."""
    parts = (len(plan.channels) + 1) * plan.seconds
    with trio.fail_after(2 * parts + PATIENCE):
        connect = partial(muxkit.connect, url, **options(url, ssl.Purpose.SERVER_AUTH, plan.folder))
        tries = [attrs.astuple(await count_round_trips(connect)) for _ in range(TRIES)]
        session, small, large, leaving = (min(times) for times in zip(*tries, strict=True))
        idle = await _keystroke_on_idle_session(connect)
        bulk = [await _carry(connect, plan.seconds, channels) for channels in plan.channels]
        bulk.append(await _carry(connect, plan.seconds, 1, beside_stalled=True))
        return Found(session=session, small=small, large=large, leaving=leaving, keystroke=idle, bulk=bulk)


async def _keystroke_on_idle_session(connect: Connect) -> float:
    times: list[float] = []
    async with connect() as session, session.open("echo") as channel:
        await round_trip(channel, bytes(KEYSTROKE))
        for _ in range(IDLE_KEYSTROKES):
            began = trio.current_time()
            await round_trip(channel, bytes(KEYSTROKE))
            times.append(trio.current_time() - began)
    return statistics.median(times)


async def _carry(connect: Connect, seconds: float, channels: int, *, beside_stalled: bool = False) -> Bulk:
    receipts: list[Receipt] = []
    keystrokes: list[float] = []
    async with connect() as session:
        async with trio.open_nursery() as beside:
            beside.start_soon(_type, session, keystrokes)
            if beside_stalled:
                beside.start_soon(_send_to_stalled, session)
            async with trio.open_nursery() as nursery:
                for _ in range(channels):
                    nursery.start_soon(_send_bulk, session, seconds, receipts)
            beside.cancel_scope.cancel()
    return Bulk(
        channels=channels,
        rate=sum(receipt.rate for receipt in receipts),
        keystroke=statistics.median(keystrokes) if keystrokes else 0.0,
        client_memory=peak_memory(),
        server_memory=max((receipt.memory or 0 for receipt in receipts), default=0) or None,
        beside_stalled=beside_stalled,
    )


async def _send_bulk(session: muxkit.Session, seconds: float, receipts: list[Receipt]) -> None:
    message = bytes(MESSAGE)
    async with session.open("bulk") as channel:
        await channel.send(str(seconds).encode())
        until = trio.current_time() + seconds
        while trio.current_time() < until:
            await channel.send(message)
        await channel.finish()
        receipts.append(msgspec.json.decode(await channel.receive(), type=Receipt))


async def _type(session: muxkit.Session, times: list[float]) -> None:
    async with session.open("echo") as channel:
        await round_trip(channel, bytes(KEYSTROKE))
        while True:
            began = trio.current_time()
            await round_trip(channel, bytes(KEYSTROKE))
            times.append(trio.current_time() - began)
            await trio.sleep(KEYSTROKE_PAUSE)


async def _send_to_stalled(session: muxkit.Session) -> None:
    async with session.open("stall") as channel:
        while True:
            await channel.send(bytes(MESSAGE))


# ---------------------------------------------------------------------------- the processes


async def measure_while_wanted(url: str, plan: Plan) -> None:
    async with trio.open_nursery() as nursery:

        async def leave() -> None:
            await until_released()
            nursery.cancel_scope.cancel()

        nursery.start_soon(leave)
        tell(await measure(url, plan))
        nursery.cancel_scope.cancel()


def run_part(part: Callable[[], Awaitable[None]]) -> Exit:
    """Run `part`, and tell the parent process why it failed."""
    try:
        trio.run(part)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        tell(Failed(failure.sentence, failure.exit))
        return failure.exit
    return Exit.OK


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server", scheme, folder]:
            sys.exit(run_part(partial(serve, scheme, folder)))
        case ["client", url, plan]:
            sys.exit(run_part(partial(measure_while_wanted, url, msgspec.json.decode(plan, type=Plan))))
