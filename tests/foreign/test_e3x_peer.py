"""Our client and our server of e3x against a plain peer that was written from the document alone."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock

import muxkit
from muxkit.protocols import e3x
from tests.foreign.e3x_peer import Channel, Datagrams, Peer, Weather, Wire, packet, packets
from tests.foreign.wire import note

ROLES = ["client", "server"]
# A plain conversation has so many packets in each direction at the most; what is beyond the last one is not lost.
PACKETS = 24


def noted(role: str, wire: Wire) -> Wire:
    note("e3x", role, wire.peer.refusals, wire.outward.drops + wire.inward.drops)
    return wire


async def plain_client(
    drive: Callable[[e3x.Session], Awaitable[None]],
    peer: Peer,
    out: Weather | None = None,
    back: Weather | None = None,
    config: e3x.Config | None = None,
) -> Wire:
    """Run `drive` with a session of ours that is connected to the peer."""
    here, there = packets()
    wire = Wire(peer, there, out, back)
    async with trio.open_nursery() as nursery:

        async def listen() -> None:
            await wire.until(lambda: False, 1000.0)
            nursery.cancel_scope.cancel()  # it was refused; the caller looks at that first

        nursery.start_soon(listen)
        with trio.fail_after(300):
            async with e3x.session(here, role="connector", linger=60, config=config) as session:
                await drive(session)
            await trio.sleep(0.5)  # what has left is still to be read and judged
        nursery.cancel_scope.cancel()
    return noted("client", wire)


async def plain_server(
    handler: Callable[[e3x.Session], Awaitable[None]],
    peer: Peer,
    talk: Callable[[Wire], Awaitable[None]],
    out: Weather | None = None,
    back: Weather | None = None,
    config: e3x.Config | None = None,
) -> Wire:
    """Run `talk` with the peer connected to a server of ours."""
    here, there = packets()
    wire = Wire(peer, there, out, back)
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            async with e3x.session(here, role="listener", linger=60, config=config) as session:
                await handler(session)

        nursery.start_soon(serve)
        with trio.fail_after(300):
            await talk(wire)
        nursery.cancel_scope.cancel()
    return noted("server", wire)


async def echo(session: muxkit.Session) -> None:
    async def answer(channel: muxkit.Channel) -> None:
        try:
            async with channel:
                async for message in channel:
                    await channel.send(message)
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        async for channel in session.incoming():
            nursery.start_soon(answer, channel)


async def converse(
    role: str,
    messages: list[bytes],
    out: Weather | None = None,
    back: Weather | None = None,
    config: e3x.Config | None = None,
) -> tuple[Peer, Wire]:
    """Send messages to an echo and check what comes back; one end is ours, the other plain."""
    peer = Peer(is_odd=role == "server")
    if role == "client":
        peer.echoes = True

        async def drive(session: e3x.Session) -> None:
            got = []
            async with session.open("test") as channel, trio.open_nursery() as nursery:

                async def send() -> None:
                    for message in messages:
                        await channel.send(message)
                    await channel.finish()

                nursery.start_soon(send)
                async for message in channel:
                    got.append(message)  # noqa: PERF401 - what came before a loss counts too
            assert got == messages or peer.refusals

        wire = await plain_client(drive, peer, out, back, config)
        channel = next(each for each in peer.channels.values() if each.type == "test")
    else:

        async def talk(wire: Wire) -> None:
            channel = peer.open()
            for message in messages:
                peer.send(channel, message)
            peer.end(channel)
            await wire.until(lambda: channel.has_ended and not channel.kept, 200)
            await wire.idle(3.0)  # what is sent again by mistake comes now

        wire = await plain_server(echo, peer, talk, out, back, config)
        channel = peer.channels[1]
    assert peer.refusals == []
    assert channel.messages == messages
    assert channel.has_ended
    return peer, wire


# ---------------------------------------------------------------- the referee


async def between(out: Weather, back: Weather, count: int) -> tuple[Peer, Peer]:
    """Let two plain peers talk, each judging the other."""
    here, there = Peer(is_odd=True), Peer(is_odd=False)
    there.echoes = True
    channel = here.open(body=b"first")
    for number in range(count):
        here.send(channel, b"%d" % number)
    here.end(channel)
    while not (channel.has_ended and not channel.kept) and trio.current_time() < 400:
        busy = True
        while busy:
            busy = False
            for near, far, weather in ((here, there, out), (there, here, back)):
                sent, near.out = near.out, []
                busy = busy or bool(sent)
                for data in sent:
                    far.judge(data)
                    for each in weather.through(data):
                        near.delivered(each)
                        far.receive(each)
        here.tick()
        there.tick()
        await trio.sleep(0.25)
    assert channel.messages == [b"first", *(b"%d" % number for number in range(count))]
    return here, there


@pytest.mark.seeds(5, soak=200)
async def test_two_plain_peers_have_nothing_to_refuse(seed: int, autojump_clock: MockClock) -> None:
    loss = 0.05 * (seed % 5)
    here, there = await between(
        Weather(loss=loss, twice=0.1, late=0.1, seed=seed), Weather(loss=loss, twice=0.1, late=0.1, seed=seed + 1), 60
    )
    assert here.refusals == there.refusals == []


OPEN = {"c": 1, "type": "test", "seq": 1}


@pytest.mark.parametrize(
    ("packets", "clause"),
    [
        ([packet({**OPEN, "seq": True})], "e3x-S02"),
        ([packet({**OPEN, "seq": 0})], "e3x-S02"),
        ([packet({**OPEN, "seq": 2**32})], "e3x-S02"),
        ([packet(OPEN), packet({"c": 1}, b"content")], "e3x-S01"),
        ([packet(OPEN), packet({"c": 1, "end": True})], "e3x-S01"),
        ([packet(OPEN), packet({"c": 1, "seq": 3})], "e3x-S03"),
        ([packet(OPEN), packet({"c": 1, "seq": 2, "end": True}), packet({"c": 1, "seq": 3})], "e3x-S01"),
        ([packet(OPEN), packet({"c": 1, "seq": 2}, b"a"), packet({"c": 1, "seq": 2}, b"b")], "e3x-M08"),
        ([packet(OPEN), packet({"c": 1, "ack": 0})], "e3x-A04"),
        ([packet(OPEN), packet({"c": 1, "ack": 1})], "e3x-A03"),
        ([packet(OPEN), packet({"c": 1, "miss": [50]})], "e3x-M03"),
        ([packet(OPEN), packet({"c": 1, "ack": 0, "miss": []})], "e3x-M02"),
        ([packet(OPEN), packet({"c": 1, "ack": 0, "miss": [0]})], "e3x-X05"),
        ([packet(OPEN), packet({"c": 1, "ack": 0, "miss": [1, 9]})], "e3x-M02"),
        ([packet(OPEN), packet({"c": 1, "err": "no", "seq": 2})], "e3x-R04"),
        ([packet(OPEN), *(packet({"c": 1, "seq": number}) for number in range(2, 52))], "e3x-M06"),
        ([packet(OPEN)] * 3, "e3x-M10"),
        ([packet({"c": 1, "type": "loose"}), packet({"c": 1, "ack": 1})], "e3x-R01"),
        ([packet({"c": 2, "type": "test", "seq": 1})], "e3x-packet"),
        ([packet({**OPEN, "more": 1})], "e3x-packet"),
        ([b"\x00\x019"], "e3x-packet"),
        ([b"\x00\x09[]"], "e3x-packet"),
        ([packet(OPEN, b"x" * 1400)], "e3x-packet"),
    ],
)
def test_the_plain_peer_refuses_what_the_document_forbids(packets: list[bytes], clause: str) -> None:
    peer = Peer(is_odd=False, now=lambda: 0.0)
    for data in packets:
        assert peer.refusals == []
        peer.judge(data)
    assert [refusal.split(":")[0] for refusal in peer.refusals] == [clause]


# ---------------------------------------------------------------- conversations


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.clause("e3x-S01", "e3x-S03", "e3x-A01", "e3x-A03", "e3x-M01", "e3x-M02")
async def test_messages_of_all_sizes_come_back(role: str, autojump_clock: MockClock) -> None:
    sizes = [0, 1, 100, 1300] if role == "server" else [0, 1, 100, 1300, 20_000]
    await converse(role, [b"m" * size for size in sizes])


@asynccontextmanager
async def bound() -> AsyncIterator[tuple[trio.socket.SocketType, tuple[str, int]]]:
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as socket:
        socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4 << 20)
        await socket.bind(("127.0.0.1", 0))
        yield socket, socket.getsockname()


OVER_UDP = [b"", b"one", b"m" * 1300, *(b"%d" % number for number in range(100))]


@pytest.mark.clause("e3x-S01", "e3x-S03", "e3x-A01", "e3x-A03", "e3x-M02")
async def test_our_client_speaks_over_udp() -> None:
    peer = Peer(is_odd=False, settled=math.inf)
    peer.echoes = True
    got: list[bytes] = []
    with trio.fail_after(60):
        async with bound() as (socket, address), trio.open_nursery() as nursery:
            wire = Wire(peer, Datagrams(socket, None))
            nursery.start_soon(wire.until, lambda: False, math.inf)
            async with muxkit.connect(f"e3x+udp://127.0.0.1:{address[1]}", linger=60) as session:
                assert isinstance(session, e3x.Session)
                async with session.open("test") as channel:
                    for message in OVER_UDP:
                        await channel.send(message)
                    await channel.finish()
                    got.extend([message async for message in channel])
            nursery.cancel_scope.cancel()
    noted("client", wire)
    assert peer.refusals == []
    assert got == OVER_UDP


@pytest.mark.clause("e3x-S01", "e3x-S03", "e3x-A01", "e3x-A03", "e3x-M02")
async def test_our_server_speaks_over_udp() -> None:
    peer = Peer(is_odd=True, settled=math.inf)

    async def start(task_status: trio.TaskStatus[muxkit.Server]) -> None:
        await muxkit.serve(echo, "e3x+udp://127.0.0.1:0", linger=60, task_status=task_status)

    with trio.fail_after(60):
        async with bound() as (socket, _), trio.open_nursery() as nursery:
            served = await nursery.start(start)
            wire = Wire(peer, Datagrams(socket, ("127.0.0.1", int(served.url.rpartition(":")[2]))))
            channel = peer.open()
            for message in OVER_UDP:
                peer.send(channel, message)
            peer.end(channel)
            await wire.until(lambda: channel.has_ended and not channel.kept, math.inf)
            nursery.cancel_scope.cancel()
    noted("server", wire)
    assert peer.refusals == []
    assert channel.messages == OVER_UDP


@pytest.mark.parametrize("role", ROLES)
async def test_three_hundred_messages_pass_a_buffer_of_fifty(role: str, autojump_clock: MockClock) -> None:
    await converse(role, [b"%d" % number for number in range(300)])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("direction", ["out", "back"])
@pytest.mark.clause("e3x-S06", "e3x-M08", "e3x-R02")
async def test_each_packet_may_be_lost_once(role: str, direction: str, autojump_clock: MockClock) -> None:
    for number in range(PACKETS):
        lost = Weather(lost=frozenset([number]))
        out, back = (lost, None) if direction == "out" else (None, lost)
        await converse(role, [b"one", b"two", b"three"], out, back)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.seeds(10, soak=1000)
async def test_loss_repetition_and_disorder_are_mended(role: str, seed: int, autojump_clock: MockClock) -> None:
    loss = 0.05 * (seed % 5)
    await converse(
        role,
        [b"%d" % number for number in range(60)],
        Weather(loss=loss, twice=0.2, late=0.2, seed=seed),
        Weather(loss=loss, twice=0.2, late=0.2, seed=seed + 1000),
    )


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.clause("e3x-M06")
async def test_a_lost_opening_costs_seconds_not_minutes(role: str, autojump_clock: MockClock) -> None:
    lost = Weather(lost=frozenset([0]))
    began = trio.current_time()
    out, back = (None, lost) if role == "client" else (lost, None)
    await converse(role, [b"%d" % number for number in range(300)], out, back)
    assert trio.current_time() - began < 30


@pytest.mark.clause("e3x-M06", "e3x-M07")
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("lowered", [1, 10, 39])
async def test_a_lowered_window_holds_for_what_is_sent_again(
    role: str, lowered: int, autojump_clock: MockClock
) -> None:
    peer = Peer(is_odd=role == "server")
    messages = [b"%d" % number for number in range(80)]
    highest: list[int] = []

    def only() -> Channel | None:
        return next((each for each in peer.channels.values() if each.type == "test" and each.seen), None)

    async def pour(channel: muxkit.Channel) -> None:
        for message in messages:
            await channel.send(message)
        await channel.finish()

    async def lower(wire: Wire) -> None:
        """Take nothing, lower the window under what is under way, and go on later."""
        await wire.until(lambda: only() is not None)
        channel = only()
        assert channel is not None
        channel.is_paused = True
        await wire.until(lambda: len(channel.seen) > 40)
        peer.window = lowered
        peer.out.append(packet({"c": channel.id, "ack": channel.done, "miss": [lowered]}))
        await wire.idle(8)
        highest.append(max(channel.seen))
        peer.window = 50
        peer.resume(channel)
        await wire.until(lambda: channel.has_ended)

    if role == "client":
        here, there = packets()
        wire = Wire(peer, there)

        async def talk() -> None:
            await lower(wire)
            await wire.until(lambda: False, math.inf)

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(talk)
                async with e3x.session(here, role="connector", linger=60) as session, session.open("test") as channel:
                    await pour(channel)
                    await channel.delivered()
                nursery.cancel_scope.cancel()
        noted("client", wire)
    else:

        async def handler(session: e3x.Session) -> None:
            async for channel in session.incoming():
                async with channel:
                    await pour(channel)

        async def ask(wire: Wire) -> None:
            peer.end(peer.open())
            await lower(wire)

        await plain_server(handler, peer, ask)
    assert peer.refusals == []
    channel_ = only()
    assert channel_ is not None
    assert channel_.messages == messages
    assert highest[0] <= 51  # nothing new above the window that was known before


@pytest.mark.parametrize("role", ROLES)
async def test_an_idle_session_says_nothing_that_the_document_forbids(role: str, autojump_clock: MockClock) -> None:
    peer = Peer(is_odd=role == "server")
    peer.echoes = True
    if role == "client":

        async def drive(session: e3x.Session) -> None:
            async with session.open("test") as channel:
                for message in (b"before", b"after"):
                    await channel.send(message)
                    assert await channel.receive() == message
                    await trio.sleep(70)

        wire = await plain_client(drive, peer)
    else:

        async def talk(wire: Wire) -> None:
            channel = peer.open()
            for number, message in enumerate((b"before", b"after"), 1):
                peer.send(channel, message)
                assert await wire.until(lambda number=number: len(channel.messages) == number)  # type: ignore[misc]
                await wire.idle(70)

        peer.echoes = False
        wire = await plain_server(echo, peer, talk)
    assert peer.refusals == []
    assert wire.inward.count > 4


@pytest.mark.clause("e3x-M06")
@pytest.mark.parametrize("role", ROLES)
async def test_a_peer_that_processes_nothing_is_sent_its_window_and_no_more(
    role: str, autojump_clock: MockClock
) -> None:
    peer = Peer(is_odd=role == "server")
    seen: list[int] = []

    async def flood(channel: muxkit.Channel) -> None:
        for number in range(300):
            await channel.send(b"%d" % number)

    async def hold(wire: Wire) -> None:
        channel = peer.open()
        channel.is_paused = True
        await wire.until(lambda: len(channel.seen) >= 50)
        await wire.idle(6)
        seen.append(max(channel.seen))
        peer.resume(channel)
        await wire.until(lambda: len(channel.messages) == 300)

    if role == "server":

        async def handler(session: e3x.Session) -> None:
            async for channel in session.incoming():
                await flood(channel)
                await channel.aclose()

        await plain_server(handler, peer, hold)
    else:

        async def drive(session: e3x.Session) -> None:
            async with session.open("test", payload=b"opening") as channel, trio.open_nursery() as nursery:
                while not any(each.type == "test" for each in peer.channels.values()):
                    await trio.lowlevel.checkpoint()
                plain = next(each for each in peer.channels.values() if each.type == "test")
                plain.is_paused = True
                nursery.start_soon(flood, channel)
                await trio.sleep(6)
                seen.append(max(plain.seen))
                peer.resume(plain)

        await plain_client(drive, peer)
    assert peer.refusals == []
    assert seen[0] <= 51


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.clause("e3x-A03")
async def test_an_application_that_takes_its_time_confirms_what_it_took(role: str, autojump_clock: MockClock) -> None:
    peer = Peer(is_odd=role == "server")
    taken: list[bytes] = []
    acks: list[int] = []

    async def slowly(channel: muxkit.Channel) -> None:
        async for message in channel:
            taken.append(message)
            await trio.sleep(0.3)
            acks.append(peer.channels[next(iter(peer.channels))].confirmed)
            assert acks[-1] <= len(taken)

    async def pour(wire: Wire) -> None:
        channel = peer.open()
        for number in range(80):
            peer.send(channel, b"%d" % number)
        peer.end(channel)
        await wire.until(lambda: not channel.kept and not channel.queue)

    if role == "server":

        async def handler(session: e3x.Session) -> None:
            async for channel in session.incoming():
                await slowly(channel)
                await channel.aclose()

        await plain_server(handler, peer, pour)
    else:

        async def drive(session: e3x.Session) -> None:
            async with session.open("loose", reliable=False) as loose:
                await loose.send(b"here")
            while not peer.channels:
                await trio.lowlevel.checkpoint()
            channel = peer.open()
            peer.channels = {channel.id: channel, **peer.channels}
            for number in range(80):
                peer.send(channel, b"%d" % number)
            peer.end(channel)
            async for opened in session.incoming():
                await slowly(opened)
                await opened.aclose()
                break

        await plain_client(drive, peer)
    assert peer.refusals == []
    assert taken == [b"%d" % number for number in range(80)]


@pytest.mark.parametrize("role", ROLES)
async def test_unreliable_channels_carry_neither_seq_nor_ack(role: str, autojump_clock: MockClock) -> None:
    peer = Peer(is_odd=role == "server")
    if role == "client":

        async def drive(session: e3x.Session) -> None:
            async with session.open("loose", reliable=False) as channel:
                for number in range(20):
                    await channel.send(b"%d" % number)

        await plain_client(drive, peer)
        channel = next(each for each in peer.channels.values() if each.type == "loose")
    else:

        async def talk(wire: Wire) -> None:
            channel = peer.open("loose", is_reliable=False)
            for number in range(20):
                peer.send(channel, b"%d" % number)
            peer.end(channel)
            await wire.until(lambda: len(channel.messages) == 20)

        await plain_server(echo, peer, talk)
        channel = peer.channels[1]
    assert peer.refusals == []
    assert channel.messages == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.clause("e3x-S09")
async def test_what_comes_twice_is_answered_with_an_ack(role: str, autojump_clock: MockClock) -> None:
    peer = Peer(is_odd=role == "server")

    async def again(wire: Wire) -> None:
        channel = peer.open(body=b"once")
        await wire.until(lambda: channel.confirmed == 1)
        counted = wire.inward.count
        peer.out.append(packet({"c": channel.id, "type": "test", "seq": 1}, b"once"))
        assert await wire.until(lambda: wire.inward.count > counted, 1.5)
        assert channel.confirmed == 1

    if role == "server":
        await plain_server(echo, peer, again)
    else:

        async def drive(session: e3x.Session) -> None:
            async with session.open("loose", reliable=False) as loose:
                await loose.send(b"here")
            while not peer.channels:
                await trio.lowlevel.checkpoint()
            channel = peer.open(body=b"once")
            async for opened in session.incoming():
                assert opened.opening == b"once"  # processed when the application has taken the channel
                break
            while not channel.confirmed:  # noqa: ASYNC110 - the plain peer has no events
                await trio.sleep(0.1)
            peer.out.append(packet({"c": channel.id, "type": "test", "seq": 1}, b"once"))
            await trio.sleep(3)
            peer.end(channel)

        await plain_client(drive, peer)
    assert peer.refusals == []


@pytest.mark.parametrize("role", ROLES)
async def test_packets_that_say_nothing_disturb_nothing(role: str, autojump_clock: MockClock) -> None:
    junk = [b"", b"\x00", b"\x00\x00", b"\x00\x00body", b"\x00\x019", b"\xff\xff{}", packet({"c": 0}), packet({"x": 1})]
    peer = Peer(is_odd=role == "server")
    if role == "client":
        peer.echoes = True

        async def drive(session: e3x.Session) -> None:
            async with session.open("test") as channel:
                for data in junk:
                    await channel.send(b"message")
                    peer.out.append(data)
                    assert await channel.receive() == b"message"

        await plain_client(drive, peer)
    else:

        async def talk(wire: Wire) -> None:
            channel = peer.open()
            for number, data in enumerate(junk):
                peer.send(channel, b"message")
                await wire.flush()
                await wire.line.send(data)
                assert await wire.until(lambda number=number: len(channel.messages) > number, 5)  # type: ignore[misc]

        await plain_server(echo, peer, talk)
    assert peer.refusals == []


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.clause("e3x-R04")
async def test_an_err_of_the_peer_ends_the_channel_and_no_other(role: str, autojump_clock: MockClock) -> None:
    peer = Peer(is_odd=role == "server")
    if role == "client":

        async def drive(session: e3x.Session) -> None:
            with pytest.raises(muxkit.ChannelCancelled) as caught:
                async with session.open("strange") as channel:
                    await channel.receive()
            assert caught.value.payload == b"unknown type"
            peer.echoes = True
            async with session.open("test") as channel:
                await channel.send(b"message")
                assert await channel.receive() == b"message"

        await plain_client(drive, peer)
    else:

        async def talk(wire: Wire) -> None:
            first, second = peer.open(), peer.open()
            peer.send(first, b"one")
            peer.send(second, b"two")
            await wire.until(lambda: bool(first.messages and second.messages))
            peer.fail(first, "no more")
            await wire.flush()
            peer.send(second, b"three")
            assert await wire.until(lambda: second.messages == [b"two", b"three"])

        await plain_server(echo, peer, talk)
    assert peer.refusals == []


@pytest.mark.parametrize("role", ROLES)
async def test_an_err_of_ours_is_the_last_of_the_channel(role: str, autojump_clock: MockClock) -> None:
    peer = Peer(is_odd=role == "server")

    async def give_up(channel: muxkit.Channel) -> None:
        await channel.send(b"begun")
        await trio.sleep(0.5)
        channel.abort()

    if role == "client":

        async def drive(session: e3x.Session) -> None:
            async with session.open("test") as channel:
                await give_up(channel)
            await trio.sleep(3)

        await plain_client(drive, peer)
    else:

        async def handler(session: e3x.Session) -> None:
            async for channel in session.incoming():
                await give_up(channel)
                await trio.sleep(3)

        async def talk(wire: Wire) -> None:
            channel = peer.open(body=b"hello")
            assert await wire.until(lambda: channel.error is not None)
            await wire.idle(3)

        await plain_server(handler, peer, talk)
    channel = next(each for each in peer.channels.values() if each.type == "test")
    assert peer.refusals == []
    assert channel.messages == [b"begun"]
    assert channel.error
