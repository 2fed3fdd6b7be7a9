"""Our Aqueduct over TCP and QUIC against a plain peer that was written from the documents alone, in both roles."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

import muxkit
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Mode
from muxkit_adapters import tcp
from tests.foreign.aqueduct_peer import (
    ACK,
    ACK_VERSION,
    COUNT,
    FINISH,
    FORGET,
    GREETING,
    HEADERS,
    LAST,
    MESSAGE,
    REPORT,
    ROUTE,
    VERSION,
    Pairs,
    Peer,
    Wire,
    varbytes,
    varint,
)
from tests.foreign.aqueduct_quic import QuicPeer, QuicWire, certificates
from tests.foreign.wire import note, share

LARGE = bytes(range(256)) * 1200  # 300 KiB, above every first window


async def with_client(
    drive: Callable[[aqueduct.Client], Awaitable[None]],
    peer: Peer,
    talk: Callable[[Wire], Awaitable[None]] | None = None,
    **cuts: int,
) -> tuple[Wire, Exception | None]:
    """Run `drive` with a client of ours and `talk`, or nothing but answers, with the plain server."""
    if isinstance(peer, QuicPeer):
        return await with_quic_client(drive, peer, talk)
    raised: Exception | None = None
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listeners[0] as listener, trio.open_nursery() as nursery:
        wires: list[Wire] = []

        async def serve() -> None:
            async with await listener.accept() as stream:
                wires.append(Wire(peer, stream, **cuts))
                if talk is not None:
                    await talk(wires[0])
                await wires[0].until(lambda: False)

        nursery.start_soon(serve)
        with trio.fail_after(60):
            try:
                async with (
                    tcp.connect("127.0.0.1", listener.socket.getsockname()[1]) as link,
                    aqueduct.connection(link, headers=[(b"user", b"ann")]) as client,
                ):
                    assert isinstance(client, aqueduct.Client)
                    await drive(client)
            except muxkit.LinkLost as error:
                raised = error
    note("aqueduct", "client", peer.refusals, bool(cuts))
    return wires[0], raised


async def with_server(
    handler: Callable[[aqueduct.Server], Awaitable[None]],
    peer: Peer,
    talk: Callable[[Wire], Awaitable[None]],
    **cuts: int,
) -> Exception | None:
    """Run `talk` with the plain client of a server of ours; what its handler raised comes back."""
    if isinstance(peer, QuicPeer):
        return await with_quic_server(handler, peer, talk)
    raised: Exception | None = None
    over = trio.Event()

    async def handle(link: trio.abc.Stream) -> None:
        nonlocal raised
        try:
            async with aqueduct.connection(link, role="server", headers=[(b"host", b"bob")]) as server:
                assert isinstance(server, aqueduct.Server)
                await handler(server)
        except Exception as error:
            raised = error
        finally:
            over.set()

    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(partial(tcp.serve, handle))
        host, port = str(addresses[0]).rpartition(":")[::2]
        with trio.fail_after(60):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                wire = Wire(peer, stream, **cuts)
                await talk(wire)
                await wire.until(lambda: False)
                await over.wait()
        nursery.cancel_scope.cancel()
    note("aqueduct", "server", peer.refusals, bool(cuts))
    return raised


@asynccontextmanager
async def datagram_socket() -> AsyncIterator[trio.socket.SocketType]:
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as socket:
        socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4 << 20)
        await socket.bind(("127.0.0.1", 0))
        yield socket


async def with_quic_client(
    drive: Callable[[aqueduct.Client], Awaitable[None]], peer: QuicPeer, talk: Callable[[Wire], Awaitable[None]] | None
) -> tuple[Wire, Exception | None]:
    raised: Exception | None = None
    async with datagram_socket() as socket, trio.open_nursery() as nursery:
        wire = QuicWire(peer, socket)

        async def serve() -> None:
            if talk is not None:
                await talk(wire)
            await wire.until(lambda: False)

        nursery.start_soon(serve)
        url = f"aqueduct+quic://127.0.0.1:{socket.getsockname()[1]}"
        with trio.fail_after(60):
            try:
                async with muxkit.connect(url, ca=certificates()["ca"], headers=[(b"user", b"ann")]) as client:
                    assert isinstance(client, aqueduct.Client)
                    await drive(client)
            except muxkit.LinkLost as error:
                raised = error
    note("aqueduct over QUIC", "client", peer.refusals)
    return wire, raised


async def with_quic_server(
    handler: Callable[[aqueduct.Server], Awaitable[None]], peer: QuicPeer, talk: Callable[[Wire], Awaitable[None]]
) -> Exception | None:
    raised: Exception | None = None
    over = trio.Event()

    async def handle(session: muxkit.Session) -> None:
        nonlocal raised
        assert isinstance(session, aqueduct.Server)
        try:
            await handler(session)
        except Exception as error:
            raised = error
            raise
        finally:
            over.set()

    options: aqueduct.ServeOptions = {
        "certificate": certificates()["certificate"],
        "key": certificates()["key"],
        "headers": [(b"host", b"bob")],
    }
    known: muxkit.ServeOptions = options  # `headers` isn't one of the options of all servers
    serve = partial(muxkit.serve, handle, "aqueduct+quic://127.0.0.1:0", **known)
    async with datagram_socket() as socket, trio.open_nursery() as nursery:
        served = await nursery.start(serve)
        with trio.fail_after(60):
            wire = QuicWire(peer, socket, ("127.0.0.1", int(served.url.rpartition(":")[2])))
            await talk(wire)
            await wire.until(lambda: False)
            await over.wait()
        nursery.cancel_scope.cancel()
    note("aqueduct over QUIC", "server", peer.refusals)
    return raised


def plain(carrier: str, *, is_client: bool, grant: int = 0, headers: Pairs = (), acks_version: bool = True) -> Peer:
    if carrier == "quic":
        return QuicPeer(is_client=is_client, headers=headers, acks_version=acks_version)
    return Peer(is_client=is_client, headers=headers, acks_version=acks_version, grant=grant)


CARRIERS = pytest.mark.parametrize("carrier", ["tcp", "quic"])
GRANTS = pytest.mark.parametrize(("carrier", "grant"), [("tcp", 0), ("tcp", 100), ("quic", 0)])


async def take(server: aqueduct.Server) -> None:
    async for _ in server.entrypoint:
        pass


async def one_by_one(server: aqueduct.Server) -> None:
    async for message in server.entrypoint:
        async with message, message.sender() as sender:
            await sender.send(message.payload)


async def echo(server: aqueduct.Server) -> None:
    """Answer each message of the entrypoint on the sender that came with it, and pass on what its receiver brings."""

    async def answer(message: aqueduct.Message) -> None:
        try:
            async with message:
                count = len(message.attachments)
                if not count:
                    return
                async with message.sender() as sender:
                    if count == 1:
                        await sender.send(message.payload, headers=message.headers)
                        return
                    async with message.receiver(1) as receiver:
                        async for each in receiver:
                            await sender.send(each.payload)
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        async for message in server.entrypoint:
            nursery.start_soon(answer, message)


# ---------------------------------------------------------------- the referee


def exchange(one: Peer, other: Peer, step: int) -> None:
    """Carry bytes between two plain peers, a few at a time, until neither has any."""
    while one.out or other.out:
        for near, far in ((one, other), (other, one)):
            data, near.out = bytes(near.out), bytearray()
            for at in range(0, len(data), step):
                far.receive(data[at : at + step])
        assert one.refusals == other.refusals == []


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("grant", [0, 100])
def test_two_plain_peers_have_nothing_to_refuse(step: int, grant: int) -> None:
    client, server = Peer(is_client=True, grant=grant), Peer(is_client=False, grant=grant)
    server.loses_datagrams = True
    exchange(client, server, step)
    here, there = client.channel(i_send=False), client.channel(i_send=True)
    client.send(0, b"first", [here, there], headers=((b"key", b"value"),))
    exchange(client, server, step)
    for number in range(20):
        client.send(there, b"%d" % number, how=("ordered", "unordered", "datagram", "lost")[number % 4])
    client.send(there, b"L" * 9000)
    client.finish(there)
    server.send(here, b"answer")
    server.cancel(here)
    exchange(client, server, step)
    once = client.channel(i_send=True, oneshot=True)
    client.send(0, b"second", [once])
    client.send(once, b"only")
    client.finish(once)
    given_up = client.channel(i_send=True)
    client.send(0, b"third", [given_up])
    exchange(client, server, step)
    client.forget(given_up)
    client.finish(0)
    exchange(client, server, step)
    assert client.is_over()
    assert server.is_over()
    assert len(server.inbox[there]) == 16
    assert server.ends[given_up] == "forgotten"
    assert client.ends[here] == "cancelled"


def told(*frames: bytes) -> bytes:
    """The beginning of a plain client, and these sequences on streams of their own."""
    begin = GREETING + bytes([LAST, 0]) + varbytes(VERSION + bytes([HEADERS, 0]))
    return begin + b"".join(bytes([LAST, at]) + varbytes(frame) for at, frame in enumerate(frames, 1))


def route(channel: int, *parts: int | bytes) -> bytes:
    """A sequence that begins with ROUTE_TO; numbers are varints."""
    head = VERSION + bytes([ROUTE]) + varint(channel)
    return head + b"".join(varint(part) if isinstance(part, int) else part for part in parts)


ONE = (MESSAGE, 0, 0, 0, 0)
# Sequences of a client that break the clause, each behind the beginning.
ILLEGAL = {
    "aqueduct-T04": [VERSION[:-1] + b"S"],
    "aqueduct-H06": [VERSION + bytes([HEADERS, 0])],
    "aqueduct-F03": [route(0, ROUTE, 0)],
    "aqueduct-F04": [route(0, ACK_VERSION)],
    "aqueduct-F05": [VERSION + bytes([MESSAGE, 0, 0, 0, 0])],
    "aqueduct-F09": [route(0, MESSAGE, 0, 0)],
    "aqueduct-F10": [route(0, 12)],
    "aqueduct-T09": [route(2, *ONE)],
    "aqueduct-T13": [route(0, MESSAGE, 0, 0, varbytes(varint(1) + b"\0"), 0)],
    "aqueduct-T15": [route(0, MESSAGE, 0, 0, varbytes(b"\x08\0\x08\0"), 0)],
    "aqueduct-E15": [route(0, MESSAGE, 0, varbytes(b"\0"), 0, 0)],
    "aqueduct-S08": [route(0, *ONE), route(0, *ONE)],
    "aqueduct-S12": [route(0, FINISH, 0, FINISH, 0)],
    "aqueduct-S10": [route(0, *ONE, FINISH, 0)],
    "aqueduct-E26": [route(12, *ONE, MESSAGE, 1, 0, 0, 0)],
    "aqueduct-S11": [route(0, COUNT, 0), route(0, FINISH, 0)],
    "aqueduct-T37": [route(1, FORGET)],
    "aqueduct-A04": [route(0, MESSAGE, 0, 0, varbytes(b"\x02\0"), 0), route(2, ACK, varbytes(b"\0\1"))],
    "aqueduct-T26": [route(0, MESSAGE, 0, 0, varbytes(b"\x02\0"), 0), route(2, ACK, 0)],
    "aqueduct-A11": [route(0, MESSAGE, 0, 0, varbytes(b"\x02\0"), 0), route(2, REPORT, 2, varbytes(b"\1"))],
    "aqueduct-T28": [route(0, MESSAGE, 0, 0, varbytes(b"\x02\0"), 0), route(2, REPORT, 6, varbytes(b"\1"))],
    "aqueduct-T32": [route(0, MESSAGE, 0, 0, varbytes(b"\x02\0"), 0), route(2, REPORT, 2, varbytes(b"\0"))],
}
# A channel that the server never made is answered with FORGET_CHANNEL, and the rest of the sequence is ignored.
TOLERATED = {"aqueduct-T37"}


@pytest.mark.parametrize("clause", ILLEGAL)
def test_the_plain_peer_refuses_what_the_document_forbids(clause: str) -> None:
    peer = Peer(is_client=False)
    peer.receive(told(*ILLEGAL[clause]))
    expected = "aqueduct-T19" if clause == "aqueduct-S11" else clause
    assert [refusal.split(":")[0] for refusal in peer.refusals] == [expected]


@CARRIERS
@pytest.mark.parametrize("clause", sorted(ILLEGAL.keys() - TOLERATED))
async def test_our_server_refuses_what_the_document_forbids(clause: str, carrier: str) -> None:
    peer = plain(carrier, is_client=True)
    peer.is_silent = True

    async def talk(wire: Wire) -> None:
        if carrier == "tcp":
            peer.out = bytearray(told(*ILLEGAL[clause]))
        else:
            for sequence in ILLEGAL[clause]:
                peer.raw(sequence)
        await wire.until(lambda: False)

    raised = await with_server(take, peer, talk)
    if isinstance(peer, QuicPeer):  # the handler may have ended before, but the client is told
        assert peer.ending is not None
        assert peer.ending[0] == 400, peer.ending  # the peer broke a rule
        assert raised is None or isinstance(raised, muxkit.LinkLost)
        return
    assert isinstance(raised, muxkit.LinkLost), raised
    assert isinstance(raised.__cause__, muxkit.RemoteProtocolError)
    assert raised.__cause__.rule is not None
    assert raised.by == "peer"


@pytest.mark.parametrize(
    "data",
    [
        b"AQUEDUX2",
        GREETING + b"\x07",
        GREETING + b"\0\0\0",
        GREETING + b"\1\1\0",
        GREETING + b"\4\0\1",
        GREETING + b"\2\0",
    ],
)
async def test_our_server_refuses_a_broken_carrier(data: bytes) -> None:
    strict = Peer(is_client=False)
    strict.receive(data)
    assert len(strict.refusals) == 1

    async def talk(wire: Wire) -> None:
        wire.peer.out = bytearray(data)
        await wire.until(lambda: False)

    silent = Peer(is_client=True)
    silent.is_silent = True
    raised = await with_server(take, silent, talk)
    assert isinstance(raised, muxkit.LinkLost)
    assert isinstance(raised.__cause__, muxkit.RemoteProtocolError)


# ---------------------------------------------------------------- our client and a plain server


def replies(peer: Peer) -> Callable[[Wire], Awaitable[None]]:
    """A plain server that answers each message of the entrypoint on the sender that came with it, and finishes that."""
    answered = 0

    def answer() -> bool:
        nonlocal answered
        box = peer.inbox.get(0, [])
        while answered < len(box):
            message = box[answered]
            answered += 1
            for channel, _ in message.attachments:
                if channel >> 1 & 1 == 1 and channel not in peer.ends:
                    peer.send(channel, message.payload, headers=message.headers)
                    peer.finish(channel)
        return False

    async def talk(wire: Wire) -> None:
        while wire.is_open:
            answer()
            await wire.until(lambda: len(peer.inbox.get(0, [])) > answered)

    return talk


@GRANTS
@pytest.mark.parametrize("acks_version", [True, False])
@pytest.mark.clause("aqueduct-V01", "aqueduct-S02", "aqueduct-S03", "aqueduct-S10", "aqueduct-S11", "aqueduct-E22")
async def test_our_client_speaks_as_the_document_says(carrier: str, grant: int, acks_version: bool) -> None:
    peer = plain(carrier, is_client=False, grant=grant, acks_version=acks_version, headers=((b"host", b"bob"),))
    got: list[bytes] = []

    async def drive(client: aqueduct.Client) -> None:
        assert await client.peer_headers() == ((b"host", b"bob"),)
        for payload in (b"", b"small", LARGE[:50_000]):
            prices, ticket = client.channel()
            await client.entrypoint.send(payload, headers=[(b"k", b"v")], attachments=[ticket])
            async with prices:
                got.extend([message.payload async for message in prices])
        letters, ticket = client.channel("sender", headers=[(b"a", b"b")])
        await client.entrypoint.send(b"letters", attachments=[ticket])
        async with letters:
            for mode in (Mode.ORDERED, Mode.UNORDERED, Mode.UNRELIABLE) * 8:
                await letters.send(mode.name.encode(), mode=mode)
            await letters.send(LARGE[:20_000], mode=Mode.UNRELIABLE)  # too large for a datagram
            await letters.finish()
        once, ticket = client.channel("sender", oneshot=True)
        await client.entrypoint.send(b"once", attachments=[ticket])
        await once.send(b"only")
        given_up, ticket = client.channel("sender")
        await client.entrypoint.send(b"given up", attachments=[ticket])
        await given_up.send(b"something")
        given_up.cancel()
        unread, ticket = client.channel()
        await client.entrypoint.send(b"unread", attachments=[ticket])
        unread.close()

    _, raised = await with_client(drive, peer, replies(peer))
    assert peer.refusals == []
    assert raised is None
    assert got == [b"", b"small", LARGE[:50_000]]
    assert peer.peer_headers == ((b"user", b"ann"),)
    box = {message.payload: message for message in peer.inbox[0]}
    (letters, headers) = box[b"letters"].attachments[0]
    assert headers == ((b"a", b"b"),)
    assert len(peer.inbox[letters]) == 25 or (carrier == "quic" and len(peer.inbox[letters]) >= 17)
    assert peer.ends[letters] == "finished"
    once = box[b"once"].attachments[0][0]
    assert once >> 2 & 1
    assert peer.ends[once] == "finished"
    assert peer.ends[box[b"given up"].attachments[0][0]] == "cancelled"
    assert peer.ends[0] == "finished"
    assert peer.is_over()


@pytest.mark.clause("aqueduct-X01", "aqueduct-A07", "aqueduct-A09")
@CARRIERS
async def test_our_client_learns_that_a_message_was_lost_in_transit(carrier: str) -> None:
    peer = plain(carrier, is_client=False)
    peer.deaf = {1}

    async def drive(client: aqueduct.Client) -> None:
        await client.entrypoint.send(b"heard", mode=Mode.UNRELIABLE)
        outer, outer_ticket = client.channel("sender")
        await client.entrypoint.send(b"not heard", mode=Mode.UNRELIABLE, attachments=[outer_ticket])
        inner, inner_ticket = client.channel()
        with pytest.raises(aqueduct.LostInTransit):  # noqa: PT012 - at the first or at the second
            await outer.send(b"lost too", attachments=[inner_ticket])
            await inner.receive()
        with pytest.raises((aqueduct.LostInTransit, trio.ClosedResourceError)):
            await outer.finish()
        receipt = await client.entrypoint.send_tracked(b"last")
        assert await receipt.arrived()

    _, raised = await with_client(drive, peer, None)
    assert peer.refusals == []
    assert raised is None
    assert [message.payload for message in peer.inbox[0]] == [b"heard", b"last"]
    assert "forgotten" in peer.ends.values()


@pytest.mark.clause("aqueduct-L11", "aqueduct-L16")
@CARRIERS
async def test_our_client_is_told_that_nobody_listens(carrier: str) -> None:
    peer = plain(carrier, is_client=False)

    async def drive(client: aqueduct.Client) -> None:
        await client.entrypoint.send(b"one")
        with pytest.raises(aqueduct.NoReceiver):  # noqa: PT012 - some are under way before it is known
            while True:
                await client.entrypoint.send(b"more")

    async def talk(wire: Wire) -> None:
        await wire.until(lambda: bool(peer.inbox))
        peer.close(0)
        await wire.flush()

    await with_client(drive, peer, talk)
    assert peer.refusals == []


# ---------------------------------------------------------------- our server and a plain client


@GRANTS
@pytest.mark.parametrize("acks_version", [True, False])
@pytest.mark.clause("aqueduct-V01", "aqueduct-H02", "aqueduct-A02", "aqueduct-A09", "aqueduct-L12", "aqueduct-L21")
async def test_our_server_speaks_as_the_document_says(carrier: str, grant: int, acks_version: bool) -> None:
    peer = plain(carrier, is_client=True, grant=grant, acks_version=acks_version)
    back: list[int] = []

    async def talk(wire: Wire) -> None:
        for payload in (b"", b"small", LARGE[:50_000]):
            back.append(peer.channel(i_send=False, oneshot=payload == b"small"))
            peer.send(0, payload, [back[-1]], headers=((b"k", b"v"),))
            assert await wire.until(lambda: peer.ends.get(back[-1]) == "finished")
        back.append(peer.channel(i_send=False))
        there = peer.channel(i_send=True)
        peer.send(0, b"both", [back[-1], there])
        for number in range(24):
            peer.send(there, b"%d" % number, how=("ordered", "unordered", "datagram")[number % 3])
            if number == 10:
                peer.count(there)
        peer.send(there, b"", how="lost")
        peer.send(there, LARGE)
        peer.finish(there)
        assert await wire.until(lambda: peer.ends.get(back[-1]) == "finished" and peer.ends.get(there) == "closed")
        assert peer.unacked[there] == 0
        arrived = [got for got, _ in peer.reports[there]]
        if carrier == "tcp":
            assert arrived == [True] * 8 + [False]
        assert (len(arrived), arrived[-1]) == (9, False)
        unread = peer.channel(i_send=True)
        peer.send(0, b"", [peer.channel(i_send=False), unread])
        peer.send(unread, b"begun")
        peer.cancel(unread)
        assert await wire.until(lambda: peer.ends.get(unread) == "closed")
        forgotten = peer.channel(i_send=True)
        peer.send(0, b"", [peer.channel(i_send=False), forgotten])
        peer.send(forgotten, b"begun")
        peer.forget(forgotten)
        peer.finish(0)
        assert await wire.until(lambda: peer.ends.get(0) == "closed")
        assert await wire.until(peer.is_over)

    raised = await with_server(echo, peer, talk)
    assert peer.refusals == []
    assert raised is None
    assert peer.peer_headers == ((b"host", b"bob"),)
    assert [message.payload for channel in back[:3] for message in peer.inbox[channel]] == [
        b"",
        b"small",
        LARGE[:50_000],
    ]
    arrived = [got for got, _ in peer.reports[next(iter(peer.reports))]]
    assert len(peer.inbox[back[3]]) == 17 + sum(arrived)


@pytest.mark.clause("aqueduct-X01", "aqueduct-L03")
@CARRIERS
async def test_our_server_takes_a_message_lost_in_transit_for_what_it_is(carrier: str) -> None:
    peer = plain(carrier, is_client=True)

    async def talk(wire: Wire) -> None:
        lost = peer.channel(i_send=True)
        peer.send(0, b"not heard", [lost], how="lost")
        peer.send(lost, b"early")
        peer.count(0)
        assert await wire.until(lambda: peer.reports.get(0) == [(False, 0)])
        there = peer.channel(i_send=False)
        peer.send(0, b"heard", [there])
        assert await wire.until(lambda: there in peer.inbox)
        peer.finish(0)
        assert await wire.until(peer.is_over)

    raised = await with_server(echo, peer, talk)
    assert peer.refusals == []
    assert raised is None


@pytest.mark.clause("aqueduct-L02")
@CARRIERS
async def test_our_server_is_asked_for_a_channel_that_it_never_made(carrier: str) -> None:
    peer = plain(carrier, is_client=True)

    async def talk(wire: Wire) -> None:
        await wire.until(lambda: peer.peer_headers is not None)
        peer.raw(VERSION + bytes([ROUTE, 1, MESSAGE, 0, 0, 0, 0]))
        assert await wire.until(lambda: peer.ends.get(1) == "forgotten")
        peer.finish(0)
        assert await wire.until(peer.is_over)

    assert await with_server(echo, peer, talk) is None
    assert peer.refusals == []


# ---------------------------------------------------------------- the line is cut


@pytest.mark.parametrize("direction", ["cut_read", "cut_write"])
@pytest.mark.seeds(1, soak=3)
async def test_our_client_survives_a_cut_at_every_byte(direction: str, seed: int) -> None:
    async def converse(**cuts: int) -> tuple[Wire, list[bytes], Exception | None]:
        peer, got = Peer(is_client=False), []

        async def drive(client: aqueduct.Client) -> None:
            answer, ticket = client.channel()
            await client.entrypoint.send(b"ask", attachments=[ticket])
            got.append((await answer.receive()).payload)

        wire, raised = await with_client(drive, peer, replies(peer), **cuts)
        assert peer.refusals == []
        return wire, got, raised

    whole, got, raised = await converse()
    assert (got, raised) == ([b"ask"], None)
    size = whole.read if direction == "cut_read" else whole.written
    for at in [0, *share(size, 3, seed, direction, "client")]:
        _, got, raised = await converse(**{direction: at})
        assert isinstance(raised, muxkit.LinkLost) or (got == [b"ask"] and raised is None), at
        assert got in ([], [b"ask"])


@pytest.mark.parametrize("direction", ["cut_read", "cut_write"])
@pytest.mark.seeds(1, soak=3)
async def test_our_server_survives_a_cut_at_every_byte(direction: str, seed: int) -> None:
    async def converse(**cuts: int) -> tuple[Wire, Peer, Exception | None]:
        peer = Peer(is_client=True)
        wires: list[Wire] = []

        async def talk(wire: Wire) -> None:
            wires.append(wire)
            there = peer.channel(i_send=False)
            peer.send(0, b"ask", [there])
            peer.finish(0)
            await wire.until(peer.is_over)

        raised = await with_server(one_by_one, peer, talk, **cuts)
        assert peer.refusals == []
        return wires[0], peer, raised

    whole, peer, raised = await converse()
    assert raised is None
    size = whole.read if direction == "cut_read" else whole.written
    for at in [0, *share(size, 3, seed, direction, "server")]:
        _, peer, raised = await converse(**{direction: at})
        assert raised is None or isinstance(raised, muxkit.LinkLost), at
        assert [message.payload for box in peer.inbox.values() for message in box] in ([], [b"ask"])


# ---------------------------------------------------------------- what a peer may hold up


@pytest.mark.requirement("R-71")
@pytest.mark.clause("aqueduct-H04")
@CARRIERS
async def test_our_server_is_understood_by_a_client_that_takes_each_sequence_in_order(carrier: str) -> None:
    """Was: An Aqueduct server wrote ACK_VERSION ahead of its connection headers in one sequence: a client that takes
    each sequence in order waited for ever.
    """
    peer = plain(carrier, is_client=True)
    peer.in_order = True

    async def talk(wire: Wire) -> None:
        assert await wire.until(lambda: peer.peer_headers is not None)
        peer.finish(0)
        await wire.until(peer.is_over)

    assert await with_server(echo, peer, talk) is None
    assert peer.refusals == []


async def test_the_common_channels_of_our_client_are_those_of_the_page() -> None:
    peer = Peer(is_client=False)
    echoed = 0

    async def talk(wire: Wire) -> None:
        nonlocal echoed
        await wire.until(lambda: len(peer.inbox.get(0, [])) == 2)
        first, second = peer.inbox[0]
        assert first.payload == b"muxkit channels"
        assert len(first.attachments) == 1
        (here, _), (there, _) = sorted(second.attachments, key=lambda each: each[0] >> 1 & 1)
        while here not in peer.ends and await wire.until(
            lambda: len(peer.inbox.get(here, [])) > echoed or here in peer.ends  # noqa: B023 - awaited in the same turn
        ):
            for message in peer.inbox.get(here, [])[echoed:]:
                peer.send(there, message.payload)
                echoed += 1
        peer.finish(there)
        await wire.until(lambda: False)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listeners[0] as listener, trio.open_nursery() as nursery:

        async def serve() -> None:
            async with await listener.accept() as stream:
                await talk(Wire(peer, stream))

        nursery.start_soon(serve)
        with trio.fail_after(60):
            port = listener.socket.getsockname()[1]
            async with muxkit.connect(f"aqueduct+tcp://127.0.0.1:{port}") as session, session.open() as channel:
                for payload in (b"one", LARGE, b"three"):
                    await channel.send(payload)
                    assert await channel.receive() == payload
                await channel.finish()
                with pytest.raises(trio.EndOfChannel):
                    await channel.receive()
    assert peer.refusals == []
    assert echoed == 3
