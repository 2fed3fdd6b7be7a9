"""Relink against a plain peer in both roles that knows only the document."""

import contextlib
from collections.abc import Awaitable, Callable

import pytest
import trio

from muxkit.protocols import relink
from muxkit.runtime import Backoff
from tests.foreign import relink_peer as plain
from tests.foreign.wire import Cutting, LineCut, Plan, Wire, note, share, uncut

MESSAGES = [[b"one"], [], [b"two", b"", b"three"]]
SOON = Backoff(first=0.001, most=0.01)
LATE = pytest.mark.parametrize("late", [False, True], ids=["", "late-resume"])


def config(tx: bool, sizes: tuple[int, int] = (2, 2)) -> relink.Config:
    return relink.Config(
        connector_transactions=tx,
        listener_transactions=tx,
        connector_id_size=sizes[0],
        listener_id_size=sizes[1],
        ack_delay=0.001,
    )


def cuts(way: str, size: int, depth: int = 3) -> Plan:
    """Cut the first connections, each some bytes later than the one before, so that a resumption is cut too."""

    def plan(number: int) -> Cutting:
        if number >= depth:
            return Cutting()
        return Cutting(sends=size + 8 * number) if way == "sends" else Cutting(takes=size + 8 * number)

    return plan


async def our_side(link: relink.Link, tx: bool, got: list[list[bytes]]) -> None:
    """Send three messages, and take what comes on channel 7."""

    async def take() -> None:
        async with link.receiver(7) as receiver:
            async for message in receiver:
                got.append([bytes(part) for part in message.parts])
                if tx:
                    message.committed()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        async with link.sender(1) as sender:
            receipts = []
            for parts in MESSAGES:
                receipts.append(await sender.send(*parts))
                if tx:
                    sender.commit()
            receipt = receipts[-1]
            await (receipt.committed() if tx else receipt.consumed())
            await sender.finish()


def prepare(peer: plain.Peer, tx: bool) -> None:
    for parts in MESSAGES:
        peer.send(7, *parts)
        if tx:
            peer.decide(7, plain.COMMIT)
    peer.close(7)
    peer.shutdown()


def fault_of(peer: plain.Peer, got: list[list[bytes]], failed: str) -> str:
    if not peer.refusals and not failed and got == MESSAGES and peer.got.get(1, []) == MESSAGES:
        return ""
    said = "; ".join(map(str, peer.refusals))
    head = f"refusals: {said}; ended by: {failed}; ours got {got}, plain got {peer.got.get(1)}"
    return "\n".join([head, *map(str, peer.wires)])


async def with_our_connector(
    peer: plain.Peer, settings: relink.Config, ours: Callable[[relink.Link], Awaitable[None]]
) -> str:
    """Run `ours` on our link to the plain listener; gives what ended it if that was not in order."""
    failed = ""
    async with trio.open_nursery() as nursery:
        port = await nursery.start(peer.listen)
        try:
            with trio.fail_after(60):
                url = f"relink+tcp://127.0.0.1:{port}"
                async with relink.link(url, config=settings, backoff=SOON, linger=60) as link:
                    await ours(link)
        except (Exception, BaseExceptionGroup) as error:  # the referee's words are the better report
            failed = repr(error)
        nursery.cancel_scope.cancel()
    note("relink", "connector", peer.refusals, sum(wire.was_cut for wire in peer.wires))
    return failed


async def with_our_listener(
    peer: plain.Peer, settings: relink.Config, ours: Callable[[relink.Link], Awaitable[None]]
) -> str:
    """Run `ours` on our link from the plain connector; gives what ended it if that was not in order."""
    failed = ""
    async with trio.open_nursery() as nursery:

        async def handle(link: relink.Link) -> None:
            try:
                await ours(link)
            except* trio.BrokenResourceError:
                pass

        async def listen(task_status: trio.TaskStatus[relink.Listening]) -> None:
            await relink.listen(
                {"": relink.Endpoint(handle, settings)}, "relink+tcp://127.0.0.1:0", linger=60, task_status=task_status
            )

        listening = await nursery.start(listen)
        try:
            with trio.fail_after(60):
                await peer.dial(int(listening.url.split(":")[2].partition("/")[0]))
        except (Exception, BaseExceptionGroup) as error:
            failed = repr(error)
        nursery.cancel_scope.cancel()
    note("relink", "listener", peer.refusals, sum(wire.was_cut for wire in peer.wires))
    return failed


async def against(peer: plain.Peer, tx: bool) -> str:
    prepare(peer, tx)
    got: list[list[bytes]] = []
    with_ours = with_our_listener if peer.connector else with_our_connector
    failed = await with_ours(peer, config(tx, peer.sizes), lambda link: our_side(link, tx, got))
    return fault_of(peer, got, failed)


async def against_our_connector(plan: Plan, tx: bool, late: bool) -> str:
    return await against(plain.Peer(False, tx, tx, plan=plan, late_resume=late), tx)


async def against_our_listener(plan: Plan, tx: bool, late: bool) -> str:
    return await against(plain.Peer(True, tx, tx, plan=plan, late_resume=late), tx)


async def plain_pair(plan: Plan, tx: bool, late: bool) -> str:
    # Two that wait for each other's resume would wait for ever.
    peers = [plain.Peer(connector, tx, tx, late_resume=late and connector) for connector in (True, False)]
    over = trio.Event()

    def told() -> None:
        # A shutdown is the last word behind all channels: when both have heard it, nothing is under way.
        if any(peer.refusals for peer in peers) or all(peer.link.their_shutdown for peer in peers):
            over.set()

    for peer, channel in zip(peers, (1, 7), strict=True):
        peer.told = told
        for parts in MESSAGES:
            peer.send(channel, *parts)
            if tx:
                peer.decide(channel, plain.COMMIT)
        peer.close(channel)
        peer.shutdown()
    peers[0].plan = plan
    async with trio.open_nursery() as nursery:
        port = await nursery.start(peers[1].listen)
        nursery.start_soon(peers[0].dial, port)
        with trio.move_on_after(60) as scope:
            await over.wait()
        nursery.cancel_scope.cancel()
    failed = "time" if scope.cancelled_caught else ""
    return fault_of(peers[1], peers[0].got.get(7, []), failed) + "; ".join(map(str, peers[0].refusals))


Against = Callable[[Plan, bool, bool], Awaitable[str]]
ROLES = pytest.mark.parametrize("talk", [against_our_connector, against_our_listener, plain_pair])
TX = pytest.mark.parametrize("tx", [False, True], ids=["plain", "transactions"])


@pytest.mark.clause("relink-F01", "relink-K02", "relink-T02", "relink-S03")
@ROLES
@TX
async def test_a_conversation_without_cuts(talk: Against, tx: bool) -> None:
    assert not await talk(uncut, tx, False)


@pytest.mark.clause("relink-R02", "relink-R03", "relink-H35", "relink-K02")
@ROLES
@TX
@LATE
@pytest.mark.parametrize("way", ["sends", "takes"])
@pytest.mark.seeds(1, soak=10)
async def test_three_cuts_at_every_byte(talk: Against, tx: bool, late: bool, way: str, seed: int) -> None:
    faults = {}
    for size in share(230, 10, seed, talk.__name__, tx, late, way):
        if fault := await talk(cuts(way, size), tx, late):
            faults[size] = fault
            if len(faults) == 3:
                break
    assert not faults, f"{len(faults)} cuts: {sorted(faults)}\n" + "\n".join(faults.values())


CONNECTOR = pytest.mark.parametrize("connector", [True, False], ids=["our-listener", "our-connector"])
CUTS = pytest.mark.parametrize("way", ["sends", "takes"])


def words(peer: plain.Peer, failed: str) -> str:
    """Give what is wrong, with the bytes."""
    said = "; ".join([*map(str, peer.refusals), *([failed] if failed else [])])
    return said and "\n".join([said, *map(str, peer.wires)])


@CONNECTOR
@pytest.mark.parametrize("sizes", [(1, 1), (4, 4), (1, 4), (4, 1), (8, 2)], ids=str)
@TX
@CUTS
@pytest.mark.seeds(1, soak=40)
async def test_channel_ids_of_other_sizes(
    connector: bool, sizes: tuple[int, int], tx: bool, way: str, seed: int
) -> None:
    for size in share(260, 40, seed, connector, sizes, tx, way):
        fault = await against(plain.Peer(connector, tx, tx, sizes=sizes, plan=cuts(way, size)), tx)
        assert not fault, f"cut at {size}: {fault}"


@pytest.mark.clause("relink-R02", "relink-R03", "relink-K02")
@CONNECTOR
@CUTS
@pytest.mark.seeds(1, soak=8)
async def test_a_message_right_before_its_close_is_not_lost(connector: bool, way: str, seed: int) -> None:
    async def ours(link: relink.Link) -> None:
        for channel in (1, 2, 3):
            sender = link.sender(channel)
            await sender.send(b"last of %d" % channel)
            sender.close()

    for size in share(200, 8, seed, connector, way):
        peer = plain.Peer(connector, plan=cuts(way, size))
        peer.shutdown()
        with_ours = with_our_listener if connector else with_our_connector
        fault = words(peer, await with_ours(peer, config(False), ours))
        assert not fault, f"cut at {size}: {fault}"
        assert peer.got == {n: [[b"last of %d" % n]] for n in (1, 2, 3)}, f"cut at {size}: {peer.got}\n{peer.wires}"


@pytest.mark.clause("relink-C05", "relink-R03")
@CONNECTOR
@CUTS
@pytest.mark.seeds(1, soak=8)
async def test_messages_to_several_channels(connector: bool, way: str, seed: int) -> None:
    channels = (1, 2, 300)
    for size in share(300, 8, seed, connector, way):
        got: dict[int, list[list[bytes]]] = {}

        async def take(link: relink.Link, channel: int) -> None:
            async with link.receiver(channel) as receiver:
                async for message in receiver:
                    got.setdefault(channel, []).append([bytes(part) for part in message.parts])  # noqa: B023 - awaited

        async def ours(link: relink.Link) -> None:
            async with trio.open_nursery() as nursery:
                for channel in channels:
                    nursery.start_soon(take, link, channel)
                senders = [link.sender(channel) for channel in channels]
                await link.multicast(senders, b"to", b"all")
                await senders[1].send(b"to one")
                receipts = await link.multicast([senders[0], senders[2]], b"to two")
                for receipt in receipts:
                    await receipt.consumed()
                for sender in senders:
                    await sender.finish()

        peer = plain.Peer(connector, plan=cuts(way, size))
        peer.multicast(list(channels), b"to", b"all")
        peer.multicast([1, 300], b"to two")
        peer.send(2, b"to one")
        for channel in channels:
            peer.close(channel)
        peer.shutdown()
        with_ours = with_our_listener if connector else with_our_connector
        fault = words(peer, await with_ours(peer, config(False), ours))
        assert not fault, f"cut at {size}: {fault}"
        two = [[b"to", b"all"], [b"to two"]]
        expected = {1: two, 2: [[b"to", b"all"], [b"to one"]], 300: two}
        assert peer.got == expected, f"cut at {size}: {peer.got}\n{peer.wires}"
        assert got == expected, f"cut at {size}: {got}\n{peer.wires}"


@pytest.mark.clause("relink-T02", "relink-R03")
@CONNECTOR
@CUTS
@pytest.mark.seeds(1, soak=8)
async def test_what_is_rolled_back_and_what_is_not_committed(connector: bool, way: str, seed: int) -> None:
    for size in share(400, 8, seed, connector, way):
        got: list[bytes] = []
        answers: list[str] = []

        async def take(link: relink.Link) -> None:
            async with link.receiver(7) as receiver:
                async for message in receiver:
                    got.append(bytes(message.data))  # noqa: B023 - awaited in the same turn
                    message.uncommitted() if got[-1] == b"bad" else message.committed()  # noqa: B023

        async def ours(link: relink.Link) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take, link)
                async with link.sender(1) as sender:
                    receipts = []
                    for payload in (b"good", b"back", b"bad", b"fine"):
                        receipts.append(await sender.send(payload))
                        sender.rollback() if payload == b"back" else sender.commit()
                    for receipt in (receipts[0], *receipts[2:]):
                        try:
                            await receipt.committed()
                            answers.append("committed")  # noqa: B023 - awaited in the same turn
                        except relink.NotCommitted:
                            answers.append("uncommitted")  # noqa: B023
                    await sender.finish()

        peer = plain.Peer(connector, True, True, plan=cuts(way, size))
        for payload in (b"good", b"back", b"bad", b"fine"):
            peer.send(7, payload)
            peer.decide(7, plain.ROLLBACK if payload == b"back" else plain.COMMIT)
        out = peer.link.out[7]
        peer.close(7)
        peer.shutdown()
        with_ours = with_our_listener if connector else with_our_connector
        fault = words(peer, await with_ours(peer, config(True), ours))
        assert not fault, f"cut at {size}: {fault}"
        assert peer.got == {1: [[b"good"], [b"fine"]]}, f"cut at {size}: {peer.got}\n{peer.wires}"
        assert got == [b"good", b"bad", b"fine"], f"cut at {size}: {got}\n{peer.wires}"
        assert answers == ["committed", "uncommitted", "committed"], f"cut at {size}: {answers}\n{peer.wires}"
        assert out.outcomes[2] == plain.UNCOMMITTED, out.outcomes
        assert (out.outcomes[0], out.outcomes[3]) == (plain.COMMITTED, plain.COMMITTED), out.outcomes


def rows(table: list[tuple[str, bytes]]) -> pytest.MarkDecorator:
    ids = [f"{number}-{row[0]}" for number, row in enumerate(table)]
    return pytest.mark.parametrize(("clause", "data"), table, ids=ids)


ONE = plain.message([5], [b"one"])
ILLEGAL = [
    ("relink-G07", bytes([5 << 5]) + bytes(7)),
    ("relink-P14", bytes([1 | 5 << 2]) + bytes(7)),
    ("relink-O04", plain.control(plain.OPERATION, 3, 5)),
    ("relink-O10", plain.control(plain.ACK, 5, 5)),
    ("relink-Q04", plain.control(plain.SEQ_OPERATION, 2, 5, 0)),
    ("relink-Q09", plain.control(plain.SEQ_ACK, 4, 5, 0)),
    ("relink-R01", plain.general(plain.RESUME)),
    ("relink-T06", ONE + plain.control(plain.OPERATION, plain.COMMIT, 5)),
    ("relink-O12", plain.control(plain.SEQ_ACK, plain.CONSUMED, 5, 0)),
    ("relink-S04", plain.general(plain.SHUTDOWN) + ONE),
]
LEGAL = [
    ("relink-O13", plain.control(plain.OPERATION, plain.CLOSE, 5)),
    ("relink-O13", plain.multicast(plain.OPERATION, plain.CLOSE, [5, 6])),
    ("relink-O13", ONE + plain.multicast(plain.OPERATION, plain.CLOSE, [5, 6])),
    ("relink-O13", plain.multicast(plain.ACK, plain.CLOSED, [5, 6])),
    ("relink-C07", plain.multicast(plain.OPERATION, plain.CLOSE, [])),
    ("relink-C05", plain.message([5, 5], [b"twice"])),
    ("relink-M16", plain.message([5], [])),
]


async def say(port: int, data: bytes) -> bool:
    """Open a link, say this and a ping; return True if a pong comes, and False if the connection ends."""
    peer = plain.Peer(True)
    wire = Wire(await trio.open_tcp_stream("127.0.0.1", port))
    parser = plain.Parser()
    with trio.fail_after(60):
        try:
            await peer._greet(wire, parser)
            await wire.send(data + plain.general(plain.PING))
            while came := await wire.take():
                parser.data += came
                while (packet := parser.next()) is not None:
                    if (packet.form, packet.kind) == (-1, plain.PONG):
                        return True
        except LineCut:
            pass
        finally:
            await wire.cut()
    return False


async def our_answer(data: bytes) -> bool:
    async with trio.open_nursery() as nursery:

        async def listen(task_status: trio.TaskStatus[relink.Listening]) -> None:
            endpoints = {"": relink.Endpoint(hold, config(False))}
            await relink.listen(endpoints, "relink+tcp://127.0.0.1:0", linger=0.1, task_status=task_status)

        listening = await nursery.start(listen)
        alive = await say(int(listening.url.split(":")[2].partition("/")[0]), data)
        nursery.cancel_scope.cancel()
    return alive


async def hold(link: relink.Link) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        async for _ in link.receivers():
            pass


@rows(ILLEGAL)
async def test_the_plain_peer_refuses_what_is_illegal(clause: str, data: bytes) -> None:
    peer = plain.Peer(False)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(peer.listen)
        assert not await say(port, data)
        nursery.cancel_scope.cancel()
    assert [refusal.clause for refusal in peer.refusals] == [clause]


@rows(ILLEGAL)
async def test_our_listener_refuses_what_is_illegal(clause: str, data: bytes) -> None:
    assert not await our_answer(data), clause


@pytest.mark.clause("relink-O13", "relink-C05", "relink-C07", "relink-M16")
@rows(LEGAL)
async def test_our_listener_takes_what_is_legal(clause: str, data: bytes) -> None:
    assert await our_answer(data), clause
