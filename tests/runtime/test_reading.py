"""A receiver that reads in the reader's place gets its message, loses none of another's, and leaves errors alone."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from muxkit import LinkLost
from muxkit.protocols import bpmux
from muxkit.testing import replay, weather_pair
from muxkit_adapters import memory, tcp

from ._halves import PlainReceive, at_rest
from ._pumps import Letters, Lines, Running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


async def _into(got: list[bytes], receiver: Receiver) -> None:
    got.append(await receiver.receive())


async def test_a_receiver_that_comes_back_at_once_reads_by_itself() -> None:
    got: list[bytes] = []
    async with table() as laid, trio.open_nursery() as nursery:

        async def guest() -> None:
            got.append(await laid.a.receive())
            assert laid.here.last_reader is trio.lowlevel.current_task()

        await laid.seat(nursery, guest)
        await laid.there.send_all(b"a1")
    assert got == [b"a1"]


async def test_who_has_his_message_gives_the_place_back() -> None:
    got: list[bytes] = []
    async with table() as laid, trio.open_nursery() as nursery:
        await laid.seat(nursery, partial(_into, got, laid.a))
        await laid.there.send_all(b"a1")
        await at_rest()
        assert got == [b"a1"]
        await laid.there.send_all(b"b1")  # no task waits for a any more
        await _into(got, laid.b)
    assert got == [b"a1", b"b1"]


async def test_a_guest_serves_the_others_while_he_waits() -> None:
    got: list[bytes] = []
    async with table() as laid, trio.open_nursery() as nursery:
        await laid.seat(nursery, partial(_into, got, laid.a))
        for receiver in (laid.b, laid.a):
            nursery.start_soon(_into, got, receiver)
            await at_rest()
        for message in (b"b1", b"a1", b"a2"):
            await laid.there.send_all(message)
            await at_rest()
    assert got == [b"b1", b"a1", b"a2"]


@pytest.mark.parametrize("letter", [b"a", b"b"], ids=["for itself", "for another"])
async def test_a_deadline_that_comes_nearer_by_what_a_guest_reads_is_kept(
    letter: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    engine = Lines()
    guests: list[trio.lowlevel.Task] = []
    async with table(engine) as laid, trio.open_nursery() as nursery:

        async def guest() -> None:
            guests.append(trio.lowlevel.current_task())
            while True:  # back in the place before the reader could take it
                await laid.a.receive()

        await laid.seat(nursery, guest)
        begun = trio.current_time()

        def react(event: bytes) -> None:
            engine.deadline = begun + 5
            laid.deliver(event)

        laid.run.on_event = react
        await laid.there.send_all(letter)
        await trio.sleep(100)
        assert engine.called_at == [pytest.approx(begun + 5)]
        assert guests == [laid.here.last_reader]
        nursery.cancel_scope.cancel()


async def test_a_deadline_is_kept_that_a_guest_brought_who_was_gone_before_the_reader_stood_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = Lines()
    async with table(engine) as laid:
        for time in range(TRIES // 4):  # Trio shuffles which task runs first
            events: list[bytes] = []

            def react(event: bytes, events: list[bytes] = events) -> None:
                events.append(event)
                if event == b"a":
                    laid.there.send_nowait([b"b"])  # there already when the guest comes
                else:
                    engine.deadline = trio.current_time() + 5
                laid.deliver(event)

            async def come_when_the_reader_has_read(events: list[bytes] = events) -> None:
                while not events:
                    await trio.lowlevel.checkpoint()
                await laid.b.receive()

            laid.run.on_event = react
            async with trio.open_nursery() as nursery:
                nursery.start_soon(laid.a.receive)
                await at_rest()
                nursery.start_soon(come_when_the_reader_has_read)
                await laid.there.send_all(b"a")
            await trio.sleep(10)
            assert (events, len(engine.called_at)) == ([b"a", b"b"], time + 1)


async def test_a_cancelled_guest_leaves_the_place_to_the_reader() -> None:
    got: list[bytes] = []
    async with table() as laid, trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def guest() -> None:
            with scope:
                await laid.a.receive()

        await laid.seat(nursery, guest)
        scope.cancel()
        await at_rest()
        assert scope.cancelled_caught
        await laid.there.send_all(b"b1")
        await _into(got, laid.b)
        await laid.there.send_all(b"a1")  # and it can come again
        await _into(got, laid.a)
    assert got == [b"b1", b"a1"]


async def test_a_guest_whose_half_is_closed_is_told_at_once() -> None:
    got: list[bytes] = []
    async with table() as laid, trio.open_nursery() as nursery:
        is_told = trio.Event()

        async def guest() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await laid.a.receive()
            is_told.set()

        await laid.seat(nursery, guest)
        laid.a.close()
        await at_rest()
        assert is_told.is_set()
        await laid.there.send_all(b"b1")
        await _into(got, laid.b)
    assert got == [b"b1"]


@pytest.mark.parametrize("how", ["end", "lose", "cancel"])
async def test_a_guest_is_told_that_the_connection_is_over(how: str) -> None:
    is_told = trio.Event()

    async def guest(laid: Table) -> None:
        with pytest.raises(LinkLost):
            await laid.a.receive()
        is_told.set()

    async with trio.open_nursery() as nursery:
        async with table() as laid:
            laid.run.on_lost = laid.lose
            await laid.seat(nursery, partial(guest, laid))
            if how == "end":
                await laid.there.aclose()
            elif how == "lose":
                laid.run.pump.lose("by the test", by="local")
            await at_rest()
            assert is_told.is_set() is (how != "cancel")
    assert is_told.is_set()


async def test_a_flood_that_a_guest_met_is_for_the_reader_to_take_in_turns() -> None:
    engine = Letters()
    got: list[bytes] = []
    async with table(engine) as laid, trio.open_nursery() as nursery:
        engine.frames_at_once = 10
        await laid.seat(nursery, partial(_into, got, laid.a))
        await laid.there.send_all(b"b" * 95 + b"a")
        await at_rest()
        assert got == [b"a"]
        assert laid.b.unread == 95
        assert max(engine.fed) <= 10


async def test_a_guest_reads_nothing_from_a_connection_that_is_over() -> None:
    """The protocol may have gone on to another one, and take bytes of the old for its own."""
    async with table() as laid, trio.open_nursery() as nursery:
        await laid.seat(nursery, partial(_into, [], laid.a))
        fed = len(laid.run.engine.fed)
        await laid.there.send_all(b"a1")  # the guest is awake, and has not run yet
        laid.run.pump.lose("by the test", by="local")
        await at_rest()
        assert len(laid.run.engine.fed) == fed
        nursery.cancel_scope.cancel()


@pytest.mark.seeds(16, soak=2000)
async def test_nothing_is_lost_under_random_cancellations_of_guests(seed: int) -> None:
    dice = random.Random(seed)
    count = 300

    async def take(session: bpmux.Session, got: list[bytes]) -> None:
        async with session.open() as channel:
            await channel.send(b"go")
            while len(got) < count:
                with trio.CancelScope() as scope:
                    if dice.random() < 0.5:
                        scope.deadline = trio.current_time() + dice.choice([0, 1e-6, 1e-5, 1e-4])
                    got.append(await channel.receive())
                if dice.random() < 0.1:
                    await trio.lowlevel.checkpoint()

    async def give(session: bpmux.Session) -> None:
        with suppress(LinkLost):
            async with trio.open_nursery() as nursery:

                async def answer(channel: muxkit.Channel) -> None:
                    with suppress(muxkit.ChannelStopped):
                        assert await channel.receive() == b"go"
                        for number in range(count):
                            await channel.send(b"%d" % number)
                            if number % 3 == 0:
                                await trio.lowlevel.checkpoint()

                async for channel in session:
                    nursery.start_soon(answer, channel)

    async with trio.open_nursery() as nursery:

        async def handle(stream: trio.abc.Stream) -> None:
            with suppress(LinkLost):
                async with bpmux.session(stream) as session:
                    await give(session)

        addresses = await nursery.start(partial(tcp.serve, handle))
        host, _, port = addresses[0].rpartition(":")
        got: list[list[bytes]] = [[] for _ in range(3)]
        async with (
            tcp.connect(host, int(port)) as stream,
            bpmux.session(stream) as session,
            trio.open_nursery() as all_of,
        ):
            for one in got:
                all_of.start_soon(take, session, one)
        nursery.cancel_scope.cancel()
    assert got == [[b"%d" % number for number in range(count)]] * 3


class Words(Letters):
    """Four bytes are a frame."""

    @property
    def unparsed(self) -> int:
        return len(self._rest) // 4 * 4

    def receive_bytes(self, data: bytes, now: float) -> None:
        data = self._rest + data
        count = min(len(data) // 4, self.frames_at_once)
        self.fed.append(count)
        self.pending += [data[at : at + 4] for at in range(0, 4 * count, 4)]
        self._rest = data[4 * count :]


@pytest.mark.seeds(20, soak=10_000)
async def test_whatever_happens_to_guests_nobody_waits_for_bytes_that_are_there(seed: int) -> None:
    dice = random.Random(seed)
    engine = Words()
    engine.frames_at_once = dice.choice([1, 2, 10, 1000])
    scopes: list[trio.CancelScope] = []
    sent: dict[int, list[bytes]] = {letter: [] for letter in b"ab"}
    got: dict[int, list[bytes]] = {letter: [] for letter in b"ab"}

    async def take(receiver: Receiver, mine: list[bytes]) -> None:
        while True:
            with trio.CancelScope() as scope:
                scopes.append(scope)
                scope.deadline = trio.current_time() + dice.choice([0, 1e-5, 1e9, 1e9])
                try:
                    if dice.random() < 0.8:
                        mine.append(await receiver.receive())
                    else:
                        mine += await receiver.receive_many(dice.choice([None, 1, 2]))
                finally:
                    scopes.remove(scope)

    with replay(seed):
        async with table(engine) as laid, trio.open_nursery() as nursery:
            for letter, receiver in laid.receivers.items():
                for _ in range(dice.randint(1, 3)):
                    nursery.start_soon(take, receiver, got[letter])
            for _ in range(dice.randint(20, 100)):
                what = dice.random()
                if what < 0.5:
                    data = b""
                    for letter in dice.choices(b"ab", k=dice.choice([1, 1, 1, 5, 30])):
                        sent[letter].append(b"%c%03d" % (letter, len(sent[letter])))
                        data += sent[letter][-1]
                    cut = dice.randint(0, len(data))
                    laid.there.send_nowait([data[:cut]])
                    await laid.there.send_all(data[cut:])
                elif what < 0.8:
                    for scope in dice.sample(scopes, len(scopes) // 2):
                        scope.cancel()
                else:
                    laid.here.stop_waiting()
                for _ in range(dice.choice([0, 0, 0, 1, 2, 4])):
                    await trio.lowlevel.checkpoint()
            await at_rest()
            nursery.cancel_scope.cancel()
    assert {letter: sorted(messages) for letter, messages in got.items()} == sent


async def test_a_second_receiver_of_the_same_half_waits_behind_the_first(
    autojump_clock: trio.testing.MockClock,
) -> None:
    here, there = weather_pair(5, latency=0.01)
    got: dict[int, list[bytes]] = {0: [], 1: []}
    async with bpmux.session(here) as session, bpmux.session(there) as peer, trio.open_nursery() as nursery:

        async def take(number: int) -> None:
            for _ in range(20):
                got[number].append(await session.receive())

        for number in got:
            nursery.start_soon(take, number)
        for number in range(40):
            await peer.send(b"%d" % number)
            await trio.sleep(0.05)
    assert sorted(map(int, got[0] + got[1])) == list(range(40))
    assert got[0] == sorted(got[0], key=int)


@pytest.mark.parametrize("seed", range(12))
async def test_what_fails_before_the_reader_stood_back_comes_out_of_the_pump(seed: int) -> None:
    async def guest(laid: Table) -> None:
        assert await laid.a.receive() == b"a1"
        laid.there.send_nowait([b"b"])  # there already when it waits again
        with suppress(ZeroDivisionError, LinkLost):
            await laid.a.receive()

    def fail(event: bytes) -> None:
        if event == b"b":
            raise ZeroDivisionError
        laid.deliver(event)

    with replay(seed), pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery, table() as laid:
            laid.run.on_lost = laid.lose
            await laid.seat(nursery, partial(guest, laid))
            laid.run.on_event = fail
            await laid.there.send_all(b"a1")
            await at_rest()
            assert laid.run.losses == 1  # at once, not when the block is left


@pytest.mark.requirement("R-71")
async def test_what_fails_while_a_guest_loses_the_connection_comes_out_of_the_pump() -> None:
    """Was: What failed while a waiting receiver read for all came out of that receiver, and the others slept for
    ever.
    """

    async def guest(laid: Table) -> None:
        with suppress(ZeroDivisionError):
            await laid.a.receive()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery, table() as laid:
            laid.run.on_lost = fail
            await laid.seat(nursery, partial(guest, laid))
            await laid.there.aclose()
            await at_rest()


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize(("failure", "told"), [(ZeroDivisionError, LinkLost), (KeyboardInterrupt, KeyboardInterrupt)])
async def test_what_fails_half_way_through_what_came_ends_the_connection(
    failure: type[BaseException], told: type[BaseException]
) -> None:
    """What follows it in the same read would be missing without a sign."""

    async def guest(laid: Table) -> None:
        with pytest.raises(told):
            await laid.a.receive()

    def fail(event: bytes) -> None:
        raise failure

    with pytest.RaisesGroup(failure, flatten_subgroups=True):
        async with trio.open_nursery() as nursery, table() as laid:
            laid.run.on_lost = laid.lose
            await laid.seat(nursery, partial(guest, laid))
            laid.run.on_event = fail
            await laid.there.send_all(b"b1")
            await at_rest()
            assert laid.run.losses == 1


TRIES = 200  # Trio shuffles whether the reader or the receiver runs first


class Witnessed(memory.MemoryStream):
    """Knows which task read last."""

    last_reader: trio.lowlevel.Task | None = None

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        data = super().receive_nowait(max_bytes)
        if data is not None:
            self.last_reader = trio.lowlevel.current_task()
        return data


class Receiver(PlainReceive):
    def __init__(self, run: Running) -> None:
        super().__init__(reader=run.pump.reading)


class Table:
    """A pump whose messages go to receivers by their first letter."""

    def __init__(self, run: Running, here: Witnessed, there: memory.MemoryStream) -> None:
        self.run = run
        self.here = here
        self.there = there
        self.receivers = {letter: Receiver(run) for letter in b"ab"}
        self.a, self.b = self.receivers.values()
        run.on_event = self.deliver

    def deliver(self, event: bytes) -> None:
        if event[0] in self.receivers:
            self.receivers[event[0]].deliver(event)

    def lose(self) -> None:
        for receiver in self.receivers.values():
            receiver.ended(self.run.pump.loss)

    async def seat(self, nursery: trio.Nursery, then: Callable[[], Awaitable[object]]) -> None:
        """Run `then` in a task that reads for all as soon as it waits for a message."""
        is_seated = False

        async def receive() -> None:
            nonlocal is_seated
            for _ in range(TRIES):
                await self.a.receive()
                is_seated = self.here.last_reader is trio.lowlevel.current_task()
                if is_seated:
                    break
            await then()  # the place is still free: no other task ran since

        nursery.start_soon(receive)
        for _ in range(TRIES):
            await at_rest()
            if is_seated:
                return
            await self.there.send_all(b"a")
        raise AssertionError("the reader never gave its place up")


@asynccontextmanager
async def table(engine: Lines | None = None) -> AsyncIterator[Table]:
    here, there = memory.pair()
    here.__class__ = Witnessed
    assert isinstance(here, Witnessed)
    run = Running(here, engine or Lines())
    laid = Table(run, here, there)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.pump.run)
        yield laid
        nursery.cancel_scope.cancel()
