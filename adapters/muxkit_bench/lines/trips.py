"""Counts the round trips until an answer comes: on a simulated network, or over any line whose round trip is known.

`muxkit bench --rtt` uses `count_round_trips` on real sockets. `python -m muxkit_bench.lines.trips` counts on a virtual
clock and a simulated network, where computing takes no time. So its numbers are exact, and the tests use them, too.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final

import attrs
import trio
import trio.testing
from rich.console import Console
from rich.table import Table

import muxkit
from muxkit.protocols import e3x
from muxkit.runtime import background
from muxkit.testing import SimNetwork, SimStream, SimWeather

ROUND_TRIP: Final = 0.1  # s, of the simulated network
SMALL: Final = 1000  # bytes
LARGE: Final = 100_000  # bytes
BUFFER: Final = 1024 * 1024  # bytes under way on a stream, so that it never makes a sender wait
HOST: Final = "server"
OVER_STREAM: Final = "e3x over a stream"  # elsewhere the simulated network gives e3x packets
PROTOCOLS: Final = ("bpmux", "yamux", "relink", "aqueduct", OVER_STREAM, "e3x")

Connect = Callable[[], AbstractAsyncContextManager[muxkit.Session]]


@attrs.frozen(kw_only=True)
class RoundTrips:
    """How long each step of a session took, in seconds or in round trips."""

    session: float
    """From the begin to the first answer on a channel of a new session."""
    small: float
    """A new channel, with `SMALL` bytes there and back."""
    large: float
    """The same with `LARGE` bytes."""
    leaving: float
    """From the end of the session's block to the end of `muxkit.connect`."""

    def per(self, seconds: float) -> RoundTrips:
        """Return the same times as multiples of `seconds`."""
        return RoundTrips(
            session=self.session / seconds,
            small=self.small / seconds,
            large=self.large / seconds,
            leaving=self.leaving / seconds,
        )


async def count_round_trips(connect: Connect) -> RoundTrips:
    """Run one session against a server that sends back each message of a channel; return the times in seconds."""
    clock = trio.current_time
    began = clock()
    async with connect() as session:
        async with session.open("echo") as channel:
            await round_trip(channel, b"x")
            answered = clock()
        small, large = [await _call(session, size) for size in (SMALL, LARGE)]
        leaves = clock()
    return RoundTrips(session=answered - began, small=small, large=large, leaving=clock() - leaves)


async def _call(session: muxkit.Session, size: int) -> float:
    """Open a channel, and return when a message has come back."""
    began = trio.current_time()
    async with session.open("echo") as channel:
        await round_trip(channel, bytes(size))
        return trio.current_time() - began


async def round_trip(channel: muxkit.Channel, message: bytes) -> None:
    """Send a message to a channel that sends it back."""
    await channel.send(message)
    assert await channel.receive() == message


# ---------------------------------------------------------------------------- the simulated network


def simulate(protocol: str, **options: Any) -> RoundTrips:
    """Count on a simulated network without losses and with unlimited bandwidth, on a virtual clock.

    The options go to both sides.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(partial(_simulate, protocol, options), clock=clock).per(ROUND_TRIP)


async def _simulate(protocol: str, options: dict[str, Any]) -> RoundTrips:
    with SimNetwork(weather=SimWeather(delay=ROUND_TRIP / 2, buffer=BUFFER, splits=False)) as network:
        if protocol == OVER_STREAM:
            async with background() as nursery:
                await nursery.start(network.serve, partial(_serve_e3x, options), HOST, "stream", 1)
                return await count_round_trips(partial(_connect_e3x, network, options))
        url = f"{protocol}+sim://{HOST}"
        async with muxkit.open_server(muxkit.each_channel(echo), url, **options):
            return await count_round_trips(partial(muxkit.connect, url, **options))


async def echo(channel: muxkit.Channel) -> None:
    """Send back each message."""
    async for message in channel:
        await channel.send(message)


async def _serve_e3x(options: dict[str, Any], stream: SimStream) -> None:
    async with e3x.session(stream, role="listener", **options) as session:
        await muxkit.each_channel(echo)(session)


@asynccontextmanager
async def _connect_e3x(network: SimNetwork, options: dict[str, Any]) -> AsyncGenerator[muxkit.Session, None]:
    stream = await network.dial(HOST, "stream")
    async with e3x.session(stream, role="connector", **options) as session:
        yield session


def main(protocols: Sequence[str]) -> None:
    """Print a table for these protocols, or for all."""
    table = Table(title="Round trips on a simulated network, with the handshake of TCP")
    for title in ("protocol", "new session and channel", "new channel, 1 KB", "new channel, 100 KB", "leaving"):
        table.add_column(title, justify="left" if title == "protocol" else "right")
    for protocol in protocols or PROTOCOLS:
        trips = simulate(protocol)
        table.add_row(protocol, *(f"{count:.1f}" for count in attrs.astuple(trips)))
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
