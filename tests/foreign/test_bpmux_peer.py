"""bpmux against a plain peer that knows only the document, as client and as server."""

import contextlib

import pytest
import trio

import muxkit
from muxkit.protocols import bpmux
from muxkit_adapters import tcp
from tests.conftest import SOAK
from tests.foreign import bpmux_peer as plain
from tests.foreign.wire import Cutting, listeners, note, share

LARGE = bytes(range(256)) * 12  # above what the plain peer grants, so that it has to travel in parts


async def our_answers(session: bpmux.Session) -> None:
    """Answer whatever the other side opens."""

    async def requests() -> None:
        async for request in session.requests():
            with contextlib.suppress(trio.BrokenResourceError):  # the plain peer cancels one of them
                if request.payload == b"decline":
                    await request.decline(b"")
                else:
                    await request.respond(request.payload)

    async def sources() -> None:
        async for source, _ in session.sources():
            async with source:
                async for _message in source:
                    pass

    async def sinks() -> None:
        async for sink, payload in session.sinks():
            async with sink:
                with contextlib.suppress(muxkit.ChannelStopped):  # the plain peer cancels one of them
                    for _ in range(3):
                        await sink.send(payload)

    async def duplexes() -> None:
        async for duplex in session.incoming():
            async with duplex:
                async for message in duplex:
                    await duplex.send(message)

    async with trio.open_nursery() as nursery:
        for each in (requests, sources, sinks, duplexes):
            nursery.start_soon(each)


async def our_part(session: bpmux.Session) -> None:
    """Open one of each kind, and use it."""
    await session.ping()
    assert await session.request(b"ask") == b"ask"
    async with session.open_sink(b"sink") as sink:
        await sink.send(b"small")
        await sink.send(LARGE)
        await sink.finish()
    async with session.open_source(b"src") as source:
        assert [message async for message in source] == [b"src"] * 3
    async with session.open_source(b"cancelled") as source:
        assert await source.receive() == b"cancelled"
    async with session.open_duplex(b"duplex") as duplex:
        await duplex.send(b"echo")
        assert await duplex.receive() == b"echo"
        await duplex.finish()
    await session.send(b"top")


async def their_answers(peer: plain.Peer) -> None:
    """Answer what ours opens: grant a little at a time, echo, and end."""
    done: set[int] = set()
    given: dict[int, int] = {}
    while True:
        for entity in list(peer.opened):
            kind, key = entity.kind, id(entity)
            if kind == plain.IN_STREAM and not entity.over and entity.credit_in < 16:
                peer.grant(entity, 64 if not entity.partial else 500)
            if kind == plain.IN_REQUEST and key not in done and entity.got and entity.credit_out >= len(entity.got[0]):
                done.add(key)
                peer.send(entity, entity.got[0])
            if kind == plain.IN_SINK and key not in done and entity.got:
                while not entity.over and entity.credit_out >= len(entity.got[0]) and given.get(key, 0) < 3:
                    given[key] = given.get(key, 0) + 1
                    peer.send(entity, entity.got[0])
                if given.get(key) == 3:
                    done.add(key)
                    peer.end(entity)
            half = peer.entities.get((plain.IN_SINK, entity.number)) if kind == plain.IN_STREAM else None
            if half is not None and half not in peer.opened and id(half) not in done:
                for message in entity.got[1 + given.get(key, 0) :]:
                    if half.credit_out >= len(message) and not half.over:
                        given[key] = given.get(key, 0) + 1
                        peer.send(half, message)
                if entity.ended is not None:
                    done.add(id(half))
                    peer.end(half)
        await peer.progress.wait()


async def their_part(peer: plain.Peer) -> None:
    """Open one of each kind, use it, and see that it ends."""
    await peer.until(lambda: peer.top_out.credit_out >= 16)
    peer.ping(peer.top_in)
    request = peer.open(plain.OUT_REQUEST, 0, b"question", 8)
    declined = peer.open(plain.OUT_REQUEST, 1, b"decline", 0)
    cancelled = peer.open(plain.OUT_REQUEST, 300, b"", 0)
    peer.end(cancelled)
    sink = peer.open(plain.OUT_SINK, 7, b"")
    await peer.until(lambda: sink.credit_out >= 40)
    peer.send(sink, b"")
    peer.send_split(sink, b"in parts, one byte each", 1)
    peer.ping(sink)
    await peer.until(lambda: sink.pongs == 1)
    peer.end(sink)
    stream = peer.open(plain.OUT_STREAM, 7, b"abc", 1)
    for _ in range(8):
        peer.grant(stream, 1)
    refused = peer.open(plain.OUT_STREAM, 8, b"abc", 0)
    peer.end(refused)
    sending = peer.open(plain.DUPLEX, 9, b"", 10)
    taking = peer.entities[plain.OUT_STREAM, 9]
    await peer.until(lambda: sending.credit_out >= 5)
    peer.send(sending, b"hello")
    await peer.until(lambda: taking.got == [b"hello"])
    peer.end(sending)
    everything = (request, declined, cancelled, sink, stream, refused, sending, taking)
    await peer.until(lambda: all(entity.over for entity in everything))
    await peer.until(lambda: peer.top_in.pongs == 1)
    assert request.got == [b"question"]
    assert stream.got == [b"abc"] * 3
    assert not declined.got


async def conversation(role: str, cutting: Cutting, config: bpmux.Config | None = None) -> tuple[plain.Peer, str]:
    """Run everything in one connection; gives the plain peer, and how our side ended if not in order."""
    peers: list[plain.Peer] = []
    theirs_done, gone = trio.Event(), trio.Event()
    failed = ""

    async def theirs(stream: trio.SocketStream) -> None:
        peer = plain.Peer(stream, cutting)
        peers.append(peer)
        peer.grant(peer.top_in, 500)
        async with trio.open_nursery() as nursery:

            async def script() -> None:
                await their_part(peer)
                theirs_done.set()

            nursery.start_soon(their_answers, peer)
            nursery.start_soon(script)
            await peer.run()
            nursery.cancel_scope.cancel()
        theirs_done.set()
        gone.set()

    async def ours(session: bpmux.Session) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(our_answers, session)
            await our_part(session)
            await theirs_done.wait()
            nursery.cancel_scope.cancel()

    async def guarded(stream: trio.abc.Stream) -> None:
        nonlocal failed
        try:
            async with bpmux.session(stream, config=config) as session:
                await ours(session)
        except* muxkit.LinkLost as group:
            failed = repr(group.exceptions[0])
        except* (trio.BrokenResourceError, trio.EndOfChannel) as group:
            failed = repr(group)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            if role == "client":
                bound, port = await listeners()
                nursery.start_soon(trio.serve_listeners, theirs, bound)
                async with tcp.connect("127.0.0.1", port) as stream:
                    await guarded(stream)
                await gone.wait()
            else:
                [address] = await nursery.start(tcp.serve, guarded)
                await theirs(await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2])))
            nursery.cancel_scope.cancel()
    note("bpmux", role, peers[0].refusals, peers[0].wire.was_cut)
    return peers[0], failed


ROLE = pytest.mark.parametrize("role", ["client", "server"])


@pytest.mark.clause("bpmux-T01", "bpmux-T05", "bpmux-P10", "bpmux-R31", "bpmux-R38", "bpmux-R39")
@ROLE
@pytest.mark.parametrize("initial_credit", [0, None])  # of which the plain peer knows nothing
async def test_a_conversation_without_cuts(role: str, initial_credit: int | None) -> None:
    peer, failed = await conversation(role, Cutting(), bpmux.Config(initial_credit=initial_credit))
    assert (list(map(str, peer.refusals)), failed, peer.ended) == ([], "", True), str(peer.wire)[-300:]
    got = [message for entity in peer.opened for message in entity.got]
    assert LARGE in got
    assert peer.top_in.got == [b"top"]


@pytest.mark.clause("bpmux-G13", "bpmux-T01")
@ROLE
@pytest.mark.parametrize("way", ["sends", "takes"])
@pytest.mark.seeds(1, soak=7)
async def test_a_cut_at_every_byte(role: str, way: str, seed: int) -> None:
    faults = {}
    long = share(3600, 7, seed, role, way)
    # Behind the first 280 bytes most is payload.
    for size in long if SOAK else [*long[:40], *long[40::14]]:
        peer, _ = await conversation(role, Cutting(sends=size) if way == "sends" else Cutting(takes=size))
        if peer.refusals:
            faults[size] = f"{'; '.join(map(str, peer.refusals))}\n{peer.wire}"
    assert not faults, f"{len(faults)} cuts: {sorted(faults)}\n" + next(iter(faults.values()))


C = plain.chunk
ILLEGAL: list[tuple[str, bytes]] = [
    ("bpmux-R10", C(plain.IN_REQUEST, 5, b"")),
    ("bpmux-R14", C(plain.OUT_SINK, 5)),
    ("bpmux-R14", C(plain.OUT_REQUEST, 5, None, 1)),
    ("bpmux-R15", C(plain.OUT_SINK, 5, bytes(2_000_000))),
    ("bpmux-R20", C(plain.OUT_SINK, 5, b"", ack=True)),
    ("bpmux-R21", C(plain.DUPLEX, 5, b"") * 2),
    ("bpmux-R12", C(plain.OUT_STREAM, 5, b"") + C(plain.DUPLEX, 5, b"")),
    ("bpmux-R22", C(plain.OUT_STREAM, 5, b"") * 2),
    ("bpmux-R23", C(plain.IN_SINK, 0, bytes(20_000_000))),
    ("bpmux-R25", C(plain.OUT_STREAM, 5, b"", 2**64 - 1) + C(plain.OUT_STREAM, 5, None, 1)),
    ("bpmux-R33", C(plain.IN_STREAM, 0, ack=True)),
    ("bpmux-S05", C(plain.OUT_SINK, 0, b"")),
    ("bpmux-S05", C(plain.DUPLEX, 0, b"")),
    ("bpmux-G12", bytes([0x50, 0xF8, 5, 0])),
    ("bpmux-P04", bytes([0xE0, 0])),
    ("bpmux-P05", bytes([0xE1, 0, 5])),
    ("bpmux-P07", plain.partial(5) * 2),
    ("bpmux-P08", C(plain.OUT_SINK, 5, b"") + (plain.partial(5) + C(plain.OUT_SINK, 5, b"")) * 2),
    ("bpmux-P11", plain.partial(1) + C(plain.OUT_SINK, 5, b"") + C(plain.OUT_SINK, 5, b"ab")),
]
ROWS = pytest.mark.parametrize(("clause", "data"), ILLEGAL, ids=[f"{n}-{row[0]}" for n, row in enumerate(ILLEGAL)])


@ROWS
async def test_the_plain_peer_refuses_what_is_illegal(clause: str, data: bytes) -> None:
    bound, port = await listeners()
    peers: list[plain.Peer] = []

    async def one(stream: trio.SocketStream) -> None:
        peers.append(plain.Peer(stream))
        peers[0].grant(peers[0].top_in, 100)
        await peers[0].run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, one, bound)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await send_and_wait(stream, data, end=False)
        nursery.cancel_scope.cancel()
    assert [refusal.clause for refusal in peers[0].refusals] == [clause]


async def send_and_wait(stream: trio.SocketStream, data: bytes, *, end: bool) -> None:
    with trio.fail_after(60):
        try:
            await stream.send_all(data)
            if end:
                await stream.send_eof()
            while await stream.receive_some():
                pass
        except trio.BrokenResourceError:
            pass


@pytest.mark.clause("bpmux-G20")
@ROWS
@pytest.mark.parametrize("end", [False, True], ids=["", "with-the-end"])
async def test_our_session_refuses_what_is_illegal(clause: str, data: bytes, end: bool) -> None:
    losses: list[muxkit.LinkLost] = []
    over = trio.Event()

    async def handle(stream: trio.abc.Stream) -> None:
        try:
            async with bpmux.session(stream) as session:
                await session.receive()
        except* muxkit.LinkLost as group:
            losses.extend(error for error in group.exceptions if isinstance(error, muxkit.LinkLost))
        except* trio.EndOfChannel:
            pass
        over.set()

    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(tcp.serve, handle)
        stream = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
        async with stream:
            await send_and_wait(stream, data, end=end)
        with trio.fail_after(60):
            await over.wait()
        nursery.cancel_scope.cancel()
    [loss] = losses
    assert isinstance(loss.__cause__, muxkit.RemoteProtocolError), repr(loss)


async def test_the_plain_peers_find_nothing_in_each_other() -> None:
    peers: list[plain.Peer] = []
    done = [trio.Event(), trio.Event()]
    bound, port = await listeners()

    async def one(stream: trio.SocketStream) -> None:
        peer = plain.Peer(stream)
        number = len(peers)
        peers.append(peer)
        peer.grant(peer.top_in, 500)

        async def script() -> None:
            await peer.until(lambda: peer.top_out.credit_out >= 16)
            request = peer.open(plain.OUT_REQUEST, 0, b"question", 8)
            sink = peer.open(plain.OUT_SINK, 7, b"")
            await peer.until(lambda: sink.credit_out >= 40)
            peer.send_split(sink, b"in parts", 1)
            peer.end(sink)
            stream_ = peer.open(plain.OUT_STREAM, 7, b"abc", 9)
            await peer.until(lambda: request.over and sink.over and stream_.over)
            done[number].set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(their_answers, peer)
            nursery.start_soon(script)
            await peer.run()
            nursery.cancel_scope.cancel()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, one, bound)
            nursery.start_soon(one, await trio.open_tcp_stream("127.0.0.1", port))
            for event in done:
                await event.wait()
            nursery.cancel_scope.cancel()
    assert not [refusal for peer in peers for refusal in peer.refusals]
