"""restream against a plain server and a plain client that know only the document."""

import contextlib
import functools
from typing import Any

import pytest
import trio
import trio.testing

from muxkit.protocols import restream
from tests.foreign import restream_peer as plain
from tests.foreign.wire import Cutting, Plan, Wire, note, share, uncut

UUID = "bf575c35-c25b-4386-8430-d5e2a93f3b1a"
COUNT = 4
DEPTH = 3  # connections that are cut, one behind the other


def cuts(way: str, size: int, depth: int = DEPTH) -> Plan:
    """Cut the first connections after so many bytes from (`sends`) or to (`takes`) the plain peer."""
    cutting = Cutting(sends=size) if way == "sends" else Cutting(takes=size)
    return lambda number: cutting if number < depth else Cutting()


async def our_client(server: plain.Server, ack_every: int | None = 1, count: int = COUNT) -> list[int]:
    """Read a stream of the plain server with our client."""
    got: list[int] = []
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.serve)
        config = restream.ClientConfig(ack_every=ack_every)
        with trio.fail_after(60):
            async with restream.numbers(f"restream+tcp://127.0.0.1:{port}", count=count, config=config) as reader:
                with contextlib.suppress(restream.StreamRefused):  # the server has written down why
                    async for value in reader:
                        got.append(value)  # noqa: PERF401 - what came before a refusal counts
        nursery.cancel_scope.cancel()
    noted(server)
    return got


def noted(server: plain.Server) -> None:
    note("restream", "client", server.refusals, sum(wire.was_cut for wire in server.wires))


async def our_server(nursery: trio.Nursery, store: Any, pace: float | None = None) -> int:  # noqa: ANN401
    serve = functools.partial(restream.serve, pace=pace)
    served = await nursery.start(serve, "restream+tcp://127.0.0.1:0", store)
    return int(served.url.rpartition(":")[2])


def wrong(server: plain.Server, got: list[int]) -> str:
    """Say what the plain server saw that it should not have, with the bytes."""
    [session] = server.sessions.values()
    if server.refusals or got != session.values:
        said = "; ".join(map(str, server.refusals)) or f"{len(got)} numbers of {len(session.values)}"
        return said + "\n" + "\n".join(repr(wire.transcript) for wire in server.wires)
    return ""


async def sweep_client(way: str, sizes: range, ack_every: int | None, count: int = COUNT) -> dict[int, str]:
    faults = {}
    for size in sizes:
        server = plain.Server(cuts(way, size))
        got = await our_client(server, ack_every, count)
        if fault := wrong(server, got):
            faults[size] = fault
    return faults


def report(faults: dict[int, str]) -> str:
    return f"{len(faults)} cuts: {sorted(faults)}\n" + "\n".join(list(faults.values())[:1])


@pytest.mark.clause("restream-S06", "restream-S16", "restream-S37")
@pytest.mark.parametrize("ack_every", [1, 2, 16, None])
async def test_our_client_reads_from_a_plain_server(ack_every: int | None) -> None:
    server = plain.Server()
    got = await our_client(server, ack_every)
    assert not wrong(server, got)
    assert len(server.wires) == 1


@pytest.mark.clause("restream-S16", "restream-S18", "restream-S37", "restream-S39", "restream-C08")
@pytest.mark.parametrize("ack_every", [1, 2, 16, None])
@pytest.mark.parametrize(("way", "bytes_"), [("sends", 165), ("takes", 310)])
@pytest.mark.seeds(1, soak=11)
async def test_our_client_survives_three_cuts_at_every_byte(
    way: str, bytes_: int, ack_every: int | None, seed: int
) -> None:
    faults = await sweep_client(way, share(bytes_, 11, seed, way, ack_every), ack_every)
    assert not faults, report(faults)


@pytest.mark.clause("restream-S37", "restream-S39")
@pytest.mark.seeds(6, soak=500)
async def test_our_client_acknowledges_in_order_over_many_cuts(seed: int) -> None:
    server = plain.Server(lambda number: Cutting(sends=1500 + 97 * seed + 13 * number))
    assert not wrong(server, await our_client(server, 16, 400))


@pytest.mark.clause("restream-S37", "restream-S39")
@pytest.mark.parametrize("size", range(41, 700, 41))
async def test_a_reader_that_is_behind_acknowledges_nothing_below_what_the_reconnect_said(size: int) -> None:
    server = plain.Server(cuts("sends", size, 3))
    got: list[int] = []
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.serve)
        config = restream.ClientConfig(ack_every=1)
        with trio.fail_after(60):
            async with restream.numbers(f"restream+tcp://127.0.0.1:{port}", count=20, config=config) as reader:
                with contextlib.suppress(restream.StreamRefused):
                    while len(got) < 20:
                        await trio.testing.wait_all_tasks_blocked(0.002)  # whatever can come has come
                        got.append(await reader.receive())
                with contextlib.suppress(trio.EndOfChannel, restream.StreamRefused):
                    await reader.receive()
        nursery.cancel_scope.cancel()
    noted(server)
    fault = wrong(server, got)
    assert not fault, fault


@pytest.mark.clause("restream-L08", "restream-L10")
@pytest.mark.parametrize("size", [*range(1, 40)])
async def test_our_client_resumes_a_stateless_stream(size: int) -> None:
    server = plain.Server(cuts("sends", size))
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.serve)
        with trio.fail_after(60):
            async with restream.integers(f"restream+tcp://127.0.0.1:{port}") as reader:
                assert [await reader.receive() for _ in range(24)] == [2**power for power in range(24)]
        nursery.cancel_scope.cancel()
    noted(server)
    assert not server.refusals


@pytest.mark.clause("restream-S06", "restream-S12", "restream-S20", "restream-S22")
@pytest.mark.parametrize("ack_every", [1, 2, None])
@pytest.mark.parametrize(("way", "bytes_"), [("sends", 320), ("takes", 165), ("none", 12)])
@pytest.mark.seeds(1, soak=11)
async def test_a_plain_client_reads_from_our_server_with_cuts_at_every_byte(
    way: str, bytes_: int, ack_every: int | None, seed: int
) -> None:
    faults = {}
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        port = await our_server(nursery, store)
        for size in share(bytes_, 11, seed, way, ack_every):
            plan = uncut if way == "none" else cuts(way, size)
            client = plain.Client(port, restream.new_uuid(), COUNT, plan, ack_every)
            with trio.fail_after(60):
                got = await client.run()
            note("restream", "server", client.refusals, sum(wire.was_cut for wire in client.wires))
            if client.refusals or len(got) != COUNT:
                said = "; ".join(map(str, client.refusals))
                faults[size] = said + "\n" + "\n".join(repr(wire.transcript) for wire in client.wires)
        nursery.cancel_scope.cancel()
    assert not faults, report(faults)


@pytest.mark.clause("restream-S06", "restream-S16", "restream-S22")
@pytest.mark.parametrize(("way", "bytes_"), [("sends", 300), ("takes", 300)])
@pytest.mark.seeds(1, soak=11)
async def test_our_client_reads_a_feed_that_grows_while_it_reads(way: str, bytes_: int, seed: int) -> None:
    for size in share(bytes_, 11, seed, way, "feed"):
        server = plain.Server(cuts(way, size))
        session = server.sessions[UUID] = plain.Session({}, [], is_feed=True)
        got: list[object] = []
        async with trio.open_nursery() as nursery:
            port = await nursery.start(server.serve)
            with trio.fail_after(60):
                config = restream.ClientConfig(ack_every=1)
                async with restream.stream(f"restream+tcp://127.0.0.1:{port}", uuid=UUID, config=config) as reader:
                    with contextlib.suppress(restream.StreamRefused):
                        for number in range(8):
                            session.append(100 + number)
                            if number % 2:  # two at a time
                                got += [(await reader.receive()).data for _ in range(2)]
            nursery.cancel_scope.cancel()
        noted(server)
        assert not server.refusals, f"cut at {size}: {server.refusals}\n{server.wires}"
        assert got == [{"value": 100 + number} for number in range(8)], f"cut at {size}: {got}\n{server.wires}"


@pytest.mark.clause("restream-S06", "restream-S20", "restream-S22")
@pytest.mark.parametrize(("way", "bytes_"), [("sends", 300), ("takes", 300)])
@pytest.mark.parametrize("ack_every", [1, 3, None])
@pytest.mark.seeds(1, soak=11)
async def test_a_plain_client_reads_a_feed_of_our_server(
    way: str, bytes_: int, ack_every: int | None, seed: int
) -> None:
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        serve = functools.partial(restream.serve, application=restream.Fed())
        served = await nursery.start(serve, "restream+tcp://127.0.0.1:0", store)
        for size in share(bytes_, 11, seed, way, ack_every, "feed"):
            uuid = restream.new_uuid()
            await store.register(uuid, {}, params={}, attached=False)
            client = plain.Client(int(served.url.rpartition(":")[2]), uuid, 8, cuts(way, size), ack_every, is_feed=True)

            async def feed(client: plain.Client, uuid: str) -> None:
                for number in range(8):
                    await store.append(uuid, {"value": 100 + number})
                    while number % 2 and client.last <= number:  # the next two come when these have arrived
                        await client.came.wait()

            with trio.fail_after(60):
                async with trio.open_nursery() as conversation:
                    conversation.start_soon(feed, client, uuid)
                    got = await client.run()
                    conversation.cancel_scope.cancel()
            note("restream", "server", client.refusals, sum(wire.was_cut for wire in client.wires))
            assert not client.refusals, f"cut at {size}: {client.refusals}\n{client.wires}"
            assert got == [100 + number for number in range(8)], f"cut at {size}: {got}"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["sends", "takes"])
async def test_the_plain_peers_find_nothing_in_each_other(way: str) -> None:
    for size in range(1, 300, 7):
        server = plain.Server(cuts(way, size))
        async with trio.open_nursery() as nursery:
            port = await nursery.start(server.serve)
            client = plain.Client(port, UUID, COUNT, lambda _: Cutting(sends=10**6))
            with trio.fail_after(60):
                got = await client.run()
            nursery.cancel_scope.cancel()
        assert not server.refusals + client.refusals
        assert got == server.sessions[UUID].values


def first(**fields: object) -> bytes:
    return plain.line_of({"uuid": UUID, **fields})


PARAMS = first(params={"count": 5000})
# Each row: the clause, and for each connection what is sent and behind how many messages the next piece follows.
ILLEGAL: list[tuple[str, list[list[tuple[bytes, int]]]]] = [
    ("restream-F05", [[(b"nonsense\n", 0)]]),
    ("restream-F05", [[(b"[]\n", 0)]]),
    ("restream-F05", [[(b"\xff\n", 0)]]),
    ("restream-S03", [[(first(params={"count": 0}), 0)]]),
    ("restream-S03", [[(first(params={"count": 65536}), 0)]]),
    ("restream-S03", [[(first(params={"count": True}), 0)]]),
    ("restream-S32", [[(first(ack=1), 0)]]),
    ("restream-S24", [[(first(state=3), 0)]]),
    ("restream-L14", [[(b'{"state":"abc"}\n', 0)]]),
    ("restream-S36", [[(PARAMS, 5), (first(ack=5001), 0)]]),
    ("restream-S36", [[(PARAMS, 5), (first(ack=0), 0)]]),
    ("restream-S37", [[(PARAMS, 5), (first(ack=3), 0), (first(ack=2), 0)]]),
    ("restream-S40", [[(PARAMS, 5), (plain.line_of({"uuid": "another", "ack": 2}), 0)]]),
    ("restream-S27", [[(PARAMS, 5)], [(first(state=5001), 0)]]),
    ("restream-S26", [[(PARAMS, 5), (first(ack=3), 0)], [(first(state=2), 0)]]),
    ("restream-S37", [[(PARAMS, 5), (first(ack=3), 0)], [(first(state=3), 2), (first(ack=2), 0)]]),
]
# The original counts a `state` as an acknowledgement, so an ack below it goes back; the document has it only of acks.
HARSH = [("restream-S37", [[(PARAMS, 5)], [(first(state=4), 1), (first(ack=2), 0)]])]


async def say(port: int, connections: list[list[tuple[bytes, int]]], *, closes: bool) -> list[dict[str, Any] | None]:
    """Send a row, one connection behind the other; gives what the last one brought from the first error on.

    The original keeps the connection after an error, and so does the plain server; a server that `closes` ends it.
    """
    lines = plain.Lines(Wire(await trio.open_tcp_stream("127.0.0.1", port)))
    for number, pieces in enumerate(connections):
        if number:
            if not closes:  # a plain server takes no second connection beside the first; it ends one that is ended
                await lines.wire.end()
                while await lines.next() is not None:
                    pass
            await lines.wire.cut()
            lines = plain.Lines(Wire(await trio.open_tcp_stream("127.0.0.1", port)))
        for data, messages in pieces:
            await lines.wire.send(data)
            for _ in range(messages):
                message = await lines.next()
                assert message is not None
                assert "error" not in message, message
    while (message := await lines.next()) is not None and "error" not in message:
        pass
    assert message is not None, "no error"
    answer: list[dict[str, Any] | None] = [message]
    if closes:
        answer.append(await lines.next())
    await lines.wire.cut()
    return answer


def rows(table: list[tuple[str, list[list[tuple[bytes, int]]]]]) -> pytest.MarkDecorator:
    ids = [f"{number}-{row[0]}" for number, row in enumerate(table)]
    return pytest.mark.parametrize(("clause", "connections"), table, ids=ids)


@rows(ILLEGAL + HARSH)
async def test_the_plain_server_refuses_what_is_illegal(
    clause: str, connections: list[list[tuple[bytes, int]]]
) -> None:
    server = plain.Server(pause=0.002)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.serve)
        with trio.fail_after(60):
            await say(port, connections, closes=False)
        nursery.cancel_scope.cancel()
    assert [refusal.clause for refusal in server.refusals] == [clause]


@pytest.mark.clause("restream-F05", "restream-F07", "restream-F09")
@rows(ILLEGAL)
async def test_our_server_refuses_what_is_illegal(clause: str, connections: list[list[tuple[bytes, int]]]) -> None:
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        port = await our_server(nursery, store, pace=500)
        with trio.fail_after(60):
            rest = await say(port, connections, closes=True)
        nursery.cancel_scope.cancel()
    assert rest[1:] == [None], f"{clause}: {rest}"
