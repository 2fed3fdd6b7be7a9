"""A client over several connections, cut anywhere, against a strict plain server: no line breaks the order."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from muxkit.protocols import restream
from muxkit.protocols.restream import ClientConfig, ClientEngine, Finished, Received, ReceivedValue, parse_integer
from muxkit.testing import ChaosPlan, Way, chaos_dial
from muxkit.testing._chaos import BOTH_WAYS
from muxkit_adapters import memory
from tests.protocols.restream._helpers import UUID
from tests.protocols.restream._plain_server import PlainServer, next_value, value_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from trio.testing import MockClock

    from tests.protocols.restream._plain_server import PlainConnection

COUNT = 40
MOST_STEPS = 20_000
NO_CUT = 10**9


@attrs.define
class Conversation:
    """One client and one plain server over one link after another, each of which breaks after a number of bytes."""

    dice: random.Random
    client: ClientEngine
    server: PlainServer
    pause: float = 0.5
    """How often the application takes nothing, which is how far it lags."""
    tick: float = 0.1
    """How often what was taken is acknowledged because time has passed."""
    restart: float = 0.0
    """How often the client's process ends after a cut and goes on from what was saved, or goes back to it."""
    waiting: list[Received | ReceivedValue] = attrs.field(factory=list)
    values: list[int] = attrs.field(factory=list)
    finished: bool = False
    is_whole: bool = False
    """The last connection was not to be cut: the end is acknowledged on it."""
    steps: int = 0

    def run(self, cuts: Sequence[int]) -> None:
        """Run a connection for each cut, then whole ones until the stream is over."""
        for cut in cuts:
            if not self.finished:
                self._connect(cut)
                self._live()
                self._restart()
        while not self.finished:
            self.is_whole = True
            self._connect(NO_CUT)
            self._live()

    def run_values(self, cuts: Sequence[int]) -> None:
        """Run a connection for each cut, of a stream without an end."""
        for cut in cuts:
            self._connect(cut)
            self._live()

    def _connect(self, left: int) -> None:
        client, connection, dice = self.client, self.server.connect(), self.dice
        client.connection_made(0.0)
        there = back = b""
        while left > 0:
            self.steps += 1
            assert self.steps < MOST_STEPS, f"nothing goes on: {self.server.sessions}"
            if dice.random() < 0.7:
                there += b"".join(map(bytes, client.buffers_to_send()))
            for _ in range(dice.randrange(6)):
                back += connection.next_line() or b""
            data, there = _some(dice, there, left)
            left -= len(data)
            connection.feed(data)
            data, back = _some(dice, back, left)
            left -= len(data)
            client.receive_bytes(data, 0.0)
            self._hear()
            self._live()
            if self.finished:
                # Messages that the application takes now are acknowledged before the connection ends.
                self._take(len(self.waiting))
                connection.feed((there + b"".join(map(bytes, client.buffers_to_send())))[:left])
                break
        client.connection_lost(0.0)
        assert not client.has_output()

    def _hear(self) -> None:
        for event in self.client.events():
            match event:
                case Received() | ReceivedValue():
                    self.waiting.append(event)
                case Finished():
                    self.finished = True
                case _:
                    raise AssertionError(event)

    def _live(self) -> None:
        """Let the application take some messages, and sometimes acknowledge by time."""
        if self.dice.random() > self.pause:
            self._take(self.dice.randrange(len(self.waiting) + 1))
        client = self.client
        if self.server.sessions and self.dice.random() < self.tick and len(self.values) > client.acknowledged:
            client.acknowledge(len(self.values))

    def _restart(self) -> None:
        if self.finished or self.dice.random() >= self.restart:
            return
        self.waiting.clear()
        if self.dice.random() < 0.5:
            self.client.rewind()
        else:
            self.client = ClientEngine.restore(self.client.snapshot(), config=self.client.config)

    def _take(self, count: int) -> None:
        for event in self.waiting[:count]:
            self.client.taken(event)
            if isinstance(event, Received):
                assert isinstance(event.data, dict)
                self.values.append(event.data["value"])
            else:
                self.values.append(parse_integer(event.value))
        del self.waiting[:count]


def _some(dice: random.Random, data: bytes, left: int) -> tuple[bytes, bytes]:
    """Return the bytes that arrive, and those still on the way."""
    size = min(left, dice.choice((0, 1, 7, 60, 400)))
    return data[:size], data[size:]


def talk(seed: int, cuts: Sequence[int], server: PlainServer, config: ClientConfig | None = None) -> Conversation:
    dice = random.Random(seed)
    client = ClientEngine.stateful(UUID, {"count": COUNT}, config=config)
    talked = Conversation(dice, client, server, dice.choice((0.1, 0.5, 0.9)), dice.choice((0.0, 0.05, 0.3)))
    talked.run(cuts)
    assert talked.values == [value_of(id) for id in range(1, COUNT + 1)]
    return talked


@pytest.mark.requirement("R-71")
@pytest.mark.clause("restream-S16", "restream-S26", "restream-S32", "restream-S36", "restream-S37", "restream-S39")
@pytest.mark.requirement("R-51")
def test_a_client_keeps_the_order_of_states_and_acks_wherever_its_connection_is_cut() -> None:
    """Cut the first connection at each of its bytes in turn, two more at random ones."""
    longest = len(b"".join(_whole_stream())) + 200
    for cut in range(longest):
        dice = random.Random(cut)
        talk(cut, [cut, *(dice.randrange(1200) for _ in range(3))], PlainServer())


@pytest.mark.clause("restream-S16", "restream-S26", "restream-S32", "restream-S36", "restream-S37", "restream-S39")
@pytest.mark.requirement("R-51")
@pytest.mark.seeds(40, soak=20_000)
def test_a_client_keeps_the_order_over_many_connections(seed: int) -> None:
    dice = random.Random(seed)
    cuts = [dice.choice((0, 90, 300, 900)) + dice.randrange(200) for _ in range(dice.randrange(3, 12))]
    config = ClientConfig(ack_every=dice.choice((1, 2, 16, 16, 16)))
    server = PlainServer()
    talked = talk(seed, cuts, server, config)
    if talked.is_whole:
        assert server.sessions[UUID].acknowledged == COUNT


@pytest.mark.clause("restream-S26", "restream-S37", "restream-G01")
@pytest.mark.seeds(20, soak=10_000)
def test_a_client_that_goes_back_to_what_it_saved_keeps_the_order_of_acks(seed: int) -> None:
    """A state may then be lower than an earlier one, but not lower than an ack."""
    dice = random.Random(seed)
    cuts = [dice.choice((90, 300, 900)) + dice.randrange(200) for _ in range(dice.randrange(3, 12))]
    client = ClientEngine.stateful(UUID, {"count": COUNT}, config=ClientConfig(ack_every=dice.choice((None, 2, 16))))
    server = PlainServer(state_acknowledges=False)
    talked = Conversation(dice, client, server, tick=0.1, restart=0.5)
    talked.run(cuts)
    assert talked.values == [value_of(id) for id in range(1, COUNT + 1)]


@pytest.mark.requirement("R-71")
@pytest.mark.clause("restream-S31", "restream-S38")
@pytest.mark.seeds(20, soak=5_000)
def test_a_server_that_is_full_until_an_ack_comes_is_not_left_waiting_after_a_cut(seed: int) -> None:
    """The ack that would make room may be lost with its connection, and then no message causes another ack."""
    dice = random.Random(seed)
    cuts = [dice.choice((90, 600, 900)) + dice.randrange(200) for _ in range(dice.randrange(3, 8))]
    dice = random.Random(seed)
    client = ClientEngine.stateful(UUID, {"count": COUNT})
    server = PlainServer(room=16)
    talked = Conversation(dice, client, server, tick=0.0)
    talked.run(cuts)
    assert len(talked.values) == COUNT


@pytest.mark.clause("restream-L08", "restream-L09", "restream-L15")
@pytest.mark.seeds(10, soak=2_000)
def test_a_stateless_client_goes_on_after_the_last_value_over_many_connections(seed: int) -> None:
    dice = random.Random(seed)
    cuts = [dice.randrange(300) for _ in range(dice.randrange(3, 12))]
    server = PlainServer()
    talked = Conversation(dice, ClientEngine.stateless(), server)
    talked.run_values(cuts)
    talked._take(len(talked.waiting))
    chain = [next_value(7)]
    while len(chain) < len(talked.values):
        chain.append(next_value(chain[-1]))
    assert talked.values == chain[: len(talked.values)]


def _whole_stream() -> list[bytes]:
    connection = PlainServer().connect()
    connection.feed(b'{"uuid":"%s","params":{"count":%d}}\n' % (UUID.encode(), COUNT))
    lines = []
    while (line := connection.next_line()) is not None:
        lines.append(line)
    return lines


# --- the same with a reader, whose clock is virtual


async def _serve(stream: memory.MemoryStream, connection: PlainConnection) -> None:
    heard = trio.lowlevel.ParkingLot()

    async def listen() -> None:
        while data := await stream.receive_some():
            connection.feed(data)
            heard.unpark_all()
        nursery.cancel_scope.cancel()

    async with stream:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                while not connection.closes:
                    line = connection.next_line()
                    if line is None:
                        await heard.park()
                    else:
                        await stream.send_all(line)
                await stream.send_eof()
        except* trio.BrokenResourceError:
            pass


@pytest.mark.clause("restream-S16", "restream-S26", "restream-S32", "restream-S36", "restream-S37", "restream-S39")
@pytest.mark.requirement("R-51")
@pytest.mark.seeds(20, soak=2_000)
async def test_a_reader_keeps_the_order_over_many_connections(
    seed: int, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """With default settings: acks by count and by time, while the application lags behind."""
    dice = random.Random(seed)
    server = PlainServer(room=dice.choice((16, 2**32)))
    count = 200

    @asynccontextmanager
    async def dial() -> AsyncIterator[trio.abc.Stream]:
        ours, theirs = memory.pair(capacity=dice.choice((200, 65_536)))
        nursery.start_soon(_serve, theirs, server.connect())
        async with ours:
            yield ours

    ways = dice.choice(((Way.BACK,), BOTH_WAYS))
    plan = ChaosPlan(
        delay=dice.choice((0.0, 0.1)),
        cut_after=(0, dice.choice((900, 3_000))),
        cut_ways=ways,
        reset=0.3,
        stall=dice.choice((0.0, 0.2)),
    )
    got = []
    async with chaos_dial(dial, plan, seed) as chaos:
        async with restream.numbers(chaos.dial, count=count) as numbers:
            with numbers.fail_after(3600):
                async for number in numbers:
                    got.append(number)
                    if dice.random() < 0.1:
                        await trio.sleep(dice.choice((0.0, 0.3, 1.5)))
    assert got == [value_of(id) for id in range(1, count + 1)]
    assert len(server.first_lines) >= 3 or ways is BOTH_WAYS or plan.stall
    session = server.sessions[numbers.uuid]
    assert session.acks == sorted(session.acks)
