"""What counts as a reset: closing in order never does, stopping a response does."""

from __future__ import annotations

import pytest
import trio

import muxkit
from muxkit.core.events import Failed
from muxkit.protocols.bpmux import Config, Engine, Event, Kind

LIMITS = muxkit.Limits(resets_burst=3, resets_per_second=1)
QUIET = Config(keepalive=None)


class Pair:
    """The engines of a client and a server; all bytes are delivered after each step."""

    def __init__(self) -> None:
        self.client = Engine(QUIET)
        self.server = Engine(QUIET, limits=LIMITS)
        self.reported: list[Event] = []  # by the server
        self.deliver()

    def deliver(self) -> None:
        while self.client.has_output() or self.server.has_output():
            self.reported += self.server.receive_bytes(b"".join(self.client.buffers_to_send()), 1.0)
            self.client.receive_bytes(b"".join(self.server.buffers_to_send()), 1.0)

    @property
    def failure(self) -> muxkit.RemoteProtocolError | None:
        return next((event.error for event in self.reported if isinstance(event, Failed)), None)


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-10")
def test_closing_a_duplex_in_order_is_no_reset() -> None:
    """Was: Ordinary open and close cycles met the limit on resets and ended the session after about a thousand."""
    pair = Pair()
    for _ in range(20):
        sink, stream = pair.client.open_duplex()
        sink.end()
        stream.end()
        pair.deliver()
        for server_sink in [*pair.server.entities(Kind.SINK_IN).values()]:
            server_sink.end()
    assert pair.server.starts.pause(1.0) == 0
    assert pair.failure is None


@pytest.mark.requirement("R-10")
def test_stopping_the_answer_on_a_duplex_that_goes_on_is_a_reset() -> None:
    pair = Pair()
    for number in range(4):
        assert (pair.server.starts.pause(1.0) > 0) == (number == 3)
        _, stream = pair.client.open_duplex()
        stream.end()
        pair.deliver()
    assert pair.server.starts.pause(1.0) > 0
    assert pair.failure is None


@pytest.mark.requirement("R-10")
def test_an_end_with_an_error_does_not_make_the_stop_orderly() -> None:
    pair = Pair()
    for _ in range(4):
        sink, stream = pair.client.open_duplex()
        pair.deliver()
        pair.server.entities(Kind.STREAM_IN)[sink.id].give_credit(1)
        pair.deliver()
        sink.end(b"\x01")
        stream.end()
        pair.deliver()
    assert pair.server.starts.pause(1.0) > 0
    assert pair.failure is None


@pytest.mark.requirement("R-10")
async def test_a_client_may_open_and_leave_channels_as_fast_as_it_likes() -> None:
    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    cycles = 3 * muxkit.Limits().resets_burst
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, muxkit.each_channel(echo), "bpmux+mem://resets")
        async with muxkit.connect(served.url) as session:
            for _ in range(cycles):
                async with session.open() as channel:
                    await channel.send(b"x")
                    assert await channel.receive() == b"x"
            assert await session.ping() >= 0
        nursery.cancel_scope.cancel()
