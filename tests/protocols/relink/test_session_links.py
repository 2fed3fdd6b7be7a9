"""What becomes of a link when its connection goes, another one comes, the listener forgets, or both are done."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits, LinkLost
from muxkit.protocols import relink
from muxkit.protocols.relink import Config, Endpoint, EpochChanged, Keep, Link, LinkChanged, LinkReplaced
from muxkit.runtime import Backoff, background
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory
from tests.protocols.relink._session_world import QUIET, at_rest, both, world

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.protocols.relink import Listener
    from tests.protocols.relink._session_world import World

# --- connections come and go


@pytest.mark.clause("relink-H30", "relink-H35", "relink-R01", "relink-R03")
@pytest.mark.requirement("R-51")
async def test_nothing_is_lost_or_repeated_when_a_connection_is_cut(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        receipts = []
        for number in range(50):
            receipts.append(await sender.send(b"%d" % number))
            if number % 5 == 4:
                await pair.world.cut()
        for number in range(50):
            message = await receiver.receive()
            assert message.data == b"%d" % number
            message.consume()
            if number % 7 == 6:
                await pair.world.cut()
        await receipts[-1].consumed()
        assert pair.world.links == [pair.other]


async def test_messages_may_be_sent_before_anybody_can_be_reached(autojump_clock: MockClock) -> None:
    async with world() as made:
        made.is_reachable = False
        async with made.link() as one, one.sender(1) as sender:
            receipt = await sender.send(b"early")
            assert not one.is_connected
            await trio.sleep(10)
            assert isinstance(one.outage, ConnectionRefusedError)
            made.is_reachable = True
            await one.connected()
            assert one.outage is None
            other = await made.other()
            async with other.receiver(1) as receiver:
                (await receiver.receive()).consume()
            await receipt.consumed()
            made.let_go()


@pytest.mark.requirement("R-08")
async def test_an_absent_link_takes_no_more_than_the_outbox(autojump_clock: MockClock) -> None:
    async with world() as made:
        made.is_reachable = False
        sent = 0

        async def push() -> None:
            nonlocal sent
            async with made.link(limits=Limits(outbox=10_000), linger=1) as one:
                senders = [one.sender(number) for number in range(20)]
                with trio.move_on_after(60):
                    while True:
                        await senders[sent % 20].send(bytes(1000))
                        sent += 1

        with pytest.raises(LinkLost, match="didn't close the session"):
            await push()
        assert sent == 9


@pytest.mark.requirement("R-51")
async def test_dialling_pauses_longer_after_each_failure(autojump_clock: MockClock) -> None:
    waits: list[float] = []
    async with world() as made:
        made.is_reachable = False
        backoff = Backoff(first=1.0, least=0.5, most=20.0)
        async with made.link(backoff=backoff, on_failed=lambda error, wait: waits.append(wait)):
            await trio.sleep(600)
    assert 20 < len(waits) < 200
    assert all(0.5 <= wait <= 20 for wait in waits)
    assert max(waits) > 5


@pytest.mark.requirement("R-46")
async def test_a_connection_that_went_silent_is_replaced(autojump_clock: MockClock) -> None:
    config = Config(keepalive=20.0, keepalive_timeout=20.0)
    async with both(config, limits=Limits(handshake=5.0)) as pair:
        stalled: list[trio.abc.Stream] = []
        async with pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
            for stream in pair.world.live:
                stream._incoming, lost = memory._Pipe(10**9), stream._incoming  # what comes now is never read
                stalled.append(stream)
                lost.capacity = 10**9
            await trio.sleep(45)
            receipt = await sender.send(b"x")
            (await receiver.receive()).consume()
            await receipt.consumed()
        assert pair.one.connections == 2


async def test_patience_ends_a_link_that_nobody_answers(autojump_clock: MockClock) -> None:
    async with world() as made:
        made.is_reachable = False
        with pytest.raises(LinkLost, match=r"no connection for 30 s: the test lets no connection in"):
            async with made.link(patience=30) as one:
                await one.connected()
        assert trio.current_time() == pytest.approx(30, abs=1)


async def test_a_ping_waits_for_a_connection_and_starts_again_on_the_next(autojump_clock: MockClock) -> None:
    async with both() as pair:
        pair.world.is_reachable = False
        await pair.world.cut()
        await at_rest()
        took: list[float] = []

        async def ping() -> None:
            took.append(await pair.one.ping())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ping)
            with trio.move_on_after(0.01):
                await pair.one.ping()
            await trio.sleep(5)
            pair.world.is_reachable = True
        assert took[0] < 1


# --- the listener decides


@pytest.mark.clause("relink-H22")
async def test_one_listener_serves_several_endpoints(autojump_clock: MockClock) -> None:
    names: list[str] = []

    def serve(name: str) -> Endpoint:
        async def handle(link: Link) -> None:
            async for receiver in link.receivers():
                names.extend([name + message.data.decode() async for message in receiver])

        return Endpoint(handle, QUIET)

    async with world(endpoints={"jobs": serve("jobs"), "café": serve("café")}) as made:
        for name in ("jobs", "café"):
            async with made.link(name) as one, one.sender(1) as sender:
                await sender.send(b"!")
        assert names == ["jobs!", "café!"]
        with pytest.raises(LinkLost, match="it may not know the endpoint 'chat'"):
            async with made.link("chat", patience=5) as one:
                await one.connected()


@pytest.mark.clause("relink-H23", "relink-H24")
@pytest.mark.parametrize(
    "config", [Config(keepalive=None, connector_transactions=True), Config(keepalive=None, listener_id_size=3)]
)
async def test_a_connector_with_other_settings_is_not_let_in(config: Config, autojump_clock: MockClock) -> None:
    async with world() as made:
        with pytest.raises(LinkLost, match="hung up during the handshake"):
            async with made.link(config=config, patience=5) as one:
                await one.connected()
        assert made.listener.links == 0


@pytest.mark.clause("relink-H27", "relink-H28")
@pytest.mark.requirement("R-64")
async def test_link_ids_are_random_numbers_of_63_bits(autojump_clock: MockClock) -> None:
    async with world() as made:
        ids = []
        for _ in range(40):
            async with made.link(linger=0.1) as one:
                await one.connected()
                ids.append(one.id)
        assert len(set(ids)) == 40
        assert all(1 <= id < 2**63 for id in ids)
        assert max(ids) > 2**60
        assert sum(id % 2 for id in ids) not in (0, 40)


async def ask(made: World, *, epoch: int, link_id: int, require: bool = False) -> tuple[int, int]:
    """Return the listener's answer to a connector that asks for this link."""
    request = relink.handshake.encode_request(QUIET, epoch=epoch, link_id=link_id, require_link=require)
    async with made.dial() as stream:
        await stream.send_all(relink.handshake.encode_version(0))
        assert await stream.receive_some() == relink.handshake.encode_version(0)
        await stream.send_all(request)
        answer = await stream.receive_some()
    return int.from_bytes(answer[:8], "little"), int.from_bytes(answer[8:16], "little")


@pytest.mark.clause("relink-H28", "relink-H29", "relink-H31", "relink-H32")
@pytest.mark.requirement("R-64")
async def test_a_foreign_link_id_gets_a_new_link_or_none(autojump_clock: MockClock) -> None:
    async with both() as pair:
        epoch, ours = pair.world.listener.epoch, pair.one.id
        for asked_epoch, asked in ((epoch, ours ^ 1), (epoch + 1, ours), (epoch, 5)):
            answered_epoch, given = await ask(pair.world, epoch=asked_epoch, link_id=asked)
            assert answered_epoch == epoch
            assert given not in (asked, ours, 0)
            assert await ask(pair.world, epoch=asked_epoch, link_id=asked, require=True) == (epoch, 0)
        await at_rest()
        assert pair.one.is_connected
        assert pair.one.connections == 1


@pytest.mark.clause("relink-H29")
async def test_the_id_of_a_live_link_under_another_epoch_is_answered_with_a_new_id(autojump_clock: MockClock) -> None:
    async with both() as pair:
        epoch, ours = pair.world.listener.epoch, pair.one.id
        given = set()
        for other in (epoch - 1, epoch + 1, 1, 2**64 - 1):
            answered, link_id = await ask(pair.world, epoch=other, link_id=ours)
            assert answered == epoch
            given.add(link_id)
        assert len(given) == 4
        assert not given & {0, ours}
        assert pair.one.connections == 1
        assert await ask(pair.world, epoch=epoch, link_id=ours) == (epoch, ours), "with its epoch the id is known"


@pytest.mark.clause("relink-H30")
async def test_a_link_that_returns_replaces_its_live_connection(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        first = connection_of(pair.other).carrier
        assert first is not None
        # The connector has noticed a loss that the listener has not.
        assert connection_of(pair.one).carrier is not None
        assert await ask(pair.world, epoch=pair.world.listener.epoch, link_id=pair.one.id)
        await trio.sleep(1)
        assert first.is_lost
        receipt = await sender.send(b"x")
        (await receiver.receive()).consume()
        await receipt.consumed()
        assert pair.world.listener.links == 1


async def test_who_is_in_each_connection_leaves_it_before_the_next_begins(autojump_clock: MockClock) -> None:
    async with both() as pair:
        for _ in range(20):
            async with background() as nursery:
                for _ in range(5):
                    nursery.start_soon(_knock, pair.world, pair.one.id)
                await trio.sleep(0.1)
            await pair.one.connected()
            assert await pair.one.ping() >= 0


async def _knock(made: World, link_id: int) -> None:
    with suppress(AssertionError, trio.BrokenResourceError):  # another task was faster
        await ask(made, epoch=made.listener.epoch, link_id=link_id)


# --- the link changes


async def restart(made: World, config: Config = QUIET) -> Listener:
    """Replace the listener with another one."""
    ready = trio.Event()
    begun: list[Listener] = []

    async def run() -> None:
        async with relink.listener({config.endpoint: Endpoint(made.hold, config)}) as listener:
            begun.append(listener)
            ready.set()
            await trio.sleep_forever()

    made.nursery.start_soon(run)
    await ready.wait()
    made.listener = begun[0]
    await made.cut()
    return begun[0]


@pytest.mark.clause("relink-H26", "relink-H34")
@pytest.mark.requirement("R-39")
async def test_another_epoch_is_an_event_and_an_error_and_then_a_new_link(autojump_clock: MockClock) -> None:
    changes: list[LinkReplaced] = []
    async with world() as made, made.link(on_changed=changes.append) as one:
        await made.other()
        sender = one.sender(1)
        receipt = await sender.send(b"x")
        receiver = one.receiver(4)
        channel_id = one.id
        await trio.sleep(1)
        epoch = made.listener.epoch
        await trio.sleep(1)
        await restart(made)
        for wait in (receiver.receive, receipt.consumed, lambda: sender.send(b"y"), sender.finish):
            with pytest.raises(LinkChanged, match="another instance") as caught:
                await wait()
            assert caught.value.lost == 1
            assert isinstance(caught.value, LinkLost)
        [change] = changes
        assert isinstance(change, EpochChanged)
        assert (change.old_epoch, change.old_link_id, change.lost) == (epoch, channel_id, 1)
        assert change.link_id == one.id
        async with one.sender(1) as anew:
            assert (await anew.send(b"new")).number == 0
        other = await made.other(1)
        async with other.receiver(1) as receiver:
            assert [message.data async for message in receiver] == [b"new"]
        made.let_go()


@pytest.mark.clause("relink-H34")
async def test_a_forgotten_link_is_replaced_and_a_common_channel_told(autojump_clock: MockClock) -> None:
    async with world(keep=Keep(age=10)) as made, made.link() as one, one.open() as channel:
        await channel.send(b"x")
        other = await made.other()
        there = await anext(aiter(other))
        assert await there.receive() == b"x"
        made.is_reachable = False
        await made.cut()
        with pytest.raises(LinkLost, match="absent for longer"):
            await there.receive()
        made.is_reachable = True
        with pytest.raises(LinkChanged, match="does not know the old one") as caught:
            await channel.receive()
        assert type(caught.value.change) is LinkReplaced
        async with one.open() as anew:
            await anew.send(b"y")
            again = await anext(aiter(await made.other(1)))
            assert await again.receive() == b"y"
        made.let_go()


async def test_a_change_that_lost_messages_and_that_nobody_saw_comes_out_at_the_end(autojump_clock: MockClock) -> None:
    async def run(made: World) -> None:
        async with made.link() as one:
            sender = one.sender(1)
            await sender.send(b"x")
            await made.other()
            await restart(made)
            await trio.sleep(1)
            made.let_go()

    async with world() as made:
        with pytest.raises(LinkChanged) as caught:
            await run(made)
        assert caught.value.lost == 1


@pytest.mark.clause("relink-H31", "relink-H32", "relink-H33")
async def test_a_connector_that_wants_its_old_link_or_none_is_told(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, require_link=True)
    changes: list[LinkReplaced] = []

    async def receive(made: World) -> None:
        async with made.link(config=config, on_changed=changes.append) as one:
            await made.other()
            await restart(made, config)
            await one.receiver(1).receive()

    async with world(config) as made:
        with pytest.raises(LinkChanged, match="no link for us"):
            await receive(made)
        assert changes[0].link_id == 0
        assert made.dialled == 2


async def test_the_statistics_count_the_bytes_of_all_connections(autojump_clock: MockClock) -> None:
    links: list[Link] = []

    async def handle(link: Link) -> None:
        links.append(link)
        async for receiver in link.receivers():
            async for _ in receiver:
                pass

    async with world(handler=handle) as made, made.link() as one, one.sender(1) as sender:
        await sender.send(bytes(10_000))
        await at_rest()
        await made.cut()
        await sender.send(b"behind")
        await trio.sleep(5)
        assert one.connections == 2
        assert one.stats().bytes_sent > 10_000
        assert links[0].stats().bytes_received > 10_000
