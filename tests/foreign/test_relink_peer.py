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


def config(tx: bool) -> relink.Config:
    return relink.Config(connector_transactions=tx, listener_transactions=tx, ack_delay=0.001)


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


def fault_of(peer: plain.Peer, got: list[list[bytes]], failed: str, role: str | None = None) -> str:
    if role is not None:
        note("relink", role, peer.refusals, sum(wire.was_cut for wire in peer.wires))
    if not peer.refusals and not failed and got == MESSAGES and peer.got.get(1, []) == MESSAGES:
        return ""
    said = "; ".join(map(str, peer.refusals))
    head = f"refusals: {said}; ended by: {failed}; ours got {got}, plain got {peer.got.get(1)}"
    return "\n".join([head, *map(str, peer.wires)])


async def against_our_connector(plan: Plan, tx: bool, late: bool) -> str:
    peer = plain.Peer(False, tx, tx, plan=plan, late_resume=late)
    prepare(peer, tx)
    got: list[list[bytes]] = []
    failed = ""
    async with trio.open_nursery() as nursery:
        port = await nursery.start(peer.listen)
        try:
            with trio.fail_after(60):
                url = f"relink+tcp://127.0.0.1:{port}"
                async with relink.link(url, config=config(tx), backoff=SOON, linger=60) as link:
                    await our_side(link, tx, got)
        except (Exception, BaseExceptionGroup) as error:  # the referee's words are the better report
            failed = repr(error)
        nursery.cancel_scope.cancel()
    return fault_of(peer, got, failed, "connector")


async def against_our_listener(plan: Plan, tx: bool, late: bool) -> str:
    peer = plain.Peer(True, tx, tx, plan=plan, late_resume=late)
    prepare(peer, tx)
    got: list[list[bytes]] = []
    failed = ""
    async with trio.open_nursery() as nursery:

        async def handle(link: relink.Link) -> None:
            try:
                await our_side(link, tx, got)
            except* trio.BrokenResourceError:
                pass

        async def listen(task_status: trio.TaskStatus[relink.Listening]) -> None:
            await relink.listen(
                {"": relink.Endpoint(handle, config(tx))},
                "relink+tcp://127.0.0.1:0",
                linger=60,
                task_status=task_status,
            )

        listening = await nursery.start(listen)
        try:
            with trio.fail_after(60):
                await peer.dial(int(listening.url.split(":")[2].partition("/")[0]))
        except (Exception, BaseExceptionGroup) as error:
            failed = repr(error)
        nursery.cancel_scope.cancel()
    return fault_of(peer, got, failed, "listener")


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
ROLES = pytest.mark.parametrize("against", [against_our_connector, against_our_listener, plain_pair])
TX = pytest.mark.parametrize("tx", [False, True], ids=["plain", "transactions"])


@pytest.mark.clause("relink-F01", "relink-K02", "relink-T02", "relink-S03")
@ROLES
@TX
async def test_a_conversation_without_cuts(against: Against, tx: bool) -> None:
    assert not await against(uncut, tx, False)


@pytest.mark.clause("relink-R02", "relink-R03", "relink-H35", "relink-K02")
@ROLES
@TX
@LATE
@pytest.mark.parametrize("way", ["sends", "takes"])
@pytest.mark.seeds(1, soak=10)
async def test_three_cuts_at_every_byte(against: Against, tx: bool, late: bool, way: str, seed: int) -> None:
    faults = {}
    for size in share(230, 10, seed, against.__name__, tx, late, way):
        if fault := await against(cuts(way, size), tx, late):
            faults[size] = fault
            if len(faults) == 3:
                break
    assert not faults, f"{len(faults)} cuts: {sorted(faults)}\n" + "\n".join(faults.values())


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
