"""A listener stays up and bounded, whatever its peers and its handler do."""

from __future__ import annotations

import errno
import logging
import os
import socket
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits
from muxkit.runtime.pumps.turns import TURN_MOST, Turns, share_turns
from muxkit_adapters import memory, tcp
from muxkit_adapters._listen import serve_handshakes

from ._links import PATIENCE, at_most, drain, echo, port_of, reset, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from muxkit_adapters._sockets import SocketStream


async def says_hello(stream: trio.abc.Stream) -> None:
    await stream.send_all(b"hello")


async def test_the_stream_is_closed_after_the_handler() -> None:
    async with serving(tcp.serve, says_hello) as (address,), tcp.transport.connect(address) as stream:
        assert b"".join([data async for data in stream]) == b"hello"


async def test_a_handler_that_crashes_takes_nothing_with_it(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(stream: trio.abc.Stream) -> None:
        raise ZeroDivisionError((await stream.receive_some()).decode())

    caplog.set_level(logging.INFO)
    async with serving(tcp.serve, crash) as (address,):
        for _ in range(3):
            async with tcp.transport.connect(address) as stream:
                await stream.send_all(b"canary-secret")
                assert await stream.receive_some() == b""
    assert caplog.text.count("ZeroDivisionError") == 3


@pytest.mark.requirement("R-66")
async def test_what_a_peer_sent_is_not_logged_with_the_crash(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(stream: trio.abc.Stream) -> None:
        raise ValueError((await stream.receive_some()).decode())

    caplog.set_level(logging.INFO)
    async with serving(tcp.serve, crash) as (address,), tcp.transport.connect(address) as stream:
        await stream.send_all(b"canary-secret")
        assert await stream.receive_some() == b""
    assert "ValueError" in caplog.text
    assert "canary" not in caplog.text


async def test_a_group_of_errors_from_a_handlers_nursery_is_a_crash_like_any_other() -> None:
    async def crash(stream: trio.abc.Stream) -> None:
        async with trio.open_nursery():
            raise ValueError("in a group")

    async with serving(memory.serve, crash, "crashes"):
        for _ in range(2):
            async with memory.connect("crashes") as stream:
                assert await stream.receive_some() == b""


async def test_a_keyboard_interrupt_in_a_handler_stops_the_server() -> None:
    async def interrupt(stream: trio.abc.Stream) -> None:
        raise KeyboardInterrupt

    with pytest.raises(BaseExceptionGroup) as caught:
        async with serving(memory.serve, interrupt, "stops"), memory.connect("stops"):
            await trio.sleep_forever()
    assert caught.value.subgroup(KeyboardInterrupt) is not None


async def test_cancelling_the_server_cancels_its_handlers_and_closes_their_streams() -> None:
    cancelled = 0

    async def wait(stream: trio.abc.Stream) -> None:
        nonlocal cancelled
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled += 1
            raise

    async with trio.open_nursery() as nursery:
        async with serving(memory.serve, wait, "waits"):
            streams = [await nursery.start(_hold, "waits") for _ in range(5)]
            await trio.testing.wait_all_tasks_blocked()
        assert cancelled == 5
        assert [await stream.receive_some() for stream in streams] == [b""] * 5
        nursery.cancel_scope.cancel()


async def test_live_connections_are_bounded_and_the_next_is_served_when_one_leaves() -> None:
    live = most = served = 0
    may_leave = trio.Event()

    async def count(stream: trio.abc.Stream) -> None:
        nonlocal live, most, served
        live, served = live + 1, served + 1
        most = max(most, live)
        await stream.send_all(b"served")
        await stream.receive_some()
        live -= 1

    async with serving(memory.serve, count, "few", limits=Limits(connections=3)):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(_visit, "few", may_leave)
            await trio.testing.wait_all_tasks_blocked()
            assert (live, served) == (3, 3)
            may_leave.set()
    assert (most, served) == (3, 20)


async def test_a_handshake_gives_way_when_live_connections_and_handshakes_reach_the_limit() -> None:
    """Handshakes count as connections, but never keep one out that would finish its own."""
    async with serving(tcp.serve, echo, limits=Limits(connections=1)) as (address,):
        for _ in range(5):
            async with tcp.transport.connect(address) as stream:
                await stream.send_all(b"x")
                assert await stream.receive_some() == b"x"


async def test_a_handshake_that_never_ends_is_dropped_at_its_deadline_and_makes_room(mock_clock: MockClock) -> None:
    @asynccontextmanager
    async def never(wire: SocketStream) -> AsyncIterator[SocketStream]:
        await trio.sleep_forever()
        yield wire

    listeners, (address,) = await tcp.listen("tcp", "127.0.0.1", 0)
    limits = Limits(handshake=0.05, connections=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve_handshakes, listeners, never, echo, limits=limits))
        for _ in range(2):
            async with tcp.transport.connect(address) as stream:
                with at_most(2, mock_clock):
                    await drain(stream)
        nursery.cancel_scope.cancel()


async def test_running_out_of_descriptors_is_waited_out(caplog: pytest.LogCaptureFixture) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(tcp.serve, says_hello) as (address,):
        client = trio.socket.socket()
        hoard: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                hoard.extend(os.dup(client.fileno()) for _ in range(256))
            await client.connect(("127.0.0.1", port_of(address)))
            with trio.move_on_after(PATIENCE):
                while "Too many open files" not in caplog.text:
                    await trio.testing.wait_all_tasks_blocked(0.005)
        finally:
            for handle in hoard:
                os.close(handle)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "Too many open files" in caplog.text
        with trio.fail_after(PATIENCE):
            assert await client.recv(10) == b"hello"
        client.close()


async def test_a_listener_that_fails_for_good_stops_the_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            await tcp.serve(echo, taken.getsockname()[1])


async def _hold(name: str, task_status: trio.TaskStatus[memory.MemoryStream]) -> None:
    async with memory.connect(name) as stream:
        task_status.started(stream)
        await trio.sleep_forever()


async def _visit(name: str, may_leave: trio.Event) -> None:
    async with memory.connect(name) as stream:
        assert await stream.receive_some() == b"served"
        await may_leave.wait()


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
async def test_connections_that_were_reset_before_they_were_accepted_are_passed_over_at_once() -> None:
    """Peers that connect and reset at once keep no other peer waiting in the backlog behind them."""
    (listener, *others), (address, *_) = await tcp.listen("tcp", "127.0.0.1", 0)
    async with listener:
        for _ in range(50):
            gone = socket.create_connection(("127.0.0.1", port_of(address)))
            reset(gone)
        with socket.create_connection(("127.0.0.1", port_of(address))) as alive:
            with trio.fail_after(PATIENCE):
                accepted = await listener.accept()
            async with accepted:
                alive.sendall(b"hello")
                assert await accepted.receive_some() == b"hello"
    for other in others:
        await other.aclose()


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
async def test_connections_that_were_reset_take_no_more_of_a_pass_than_a_turn() -> None:
    """The clock moves by a third of a turn each time that it is asked."""
    asked = 0

    def clock() -> float:
        nonlocal asked
        asked += 1
        return asked * TURN_MOST / 3

    share_turns(Turns(clock))
    (listener, *others), (address, *_) = await tcp.listen("tcp", "127.0.0.1", 0)
    passes = 0

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await trio.lowlevel.checkpoint()

    async with listener, trio.open_nursery() as nursery:
        for _ in range(60):
            reset(socket.create_connection(("127.0.0.1", port_of(address))))
        with socket.create_connection(("127.0.0.1", port_of(address))):
            nursery.start_soon(count)
            with trio.fail_after(PATIENCE):
                accepted = await listener.accept()
            await accepted.aclose()
        nursery.cancel_scope.cancel()
    assert passes >= 10
    for other in others:
        await other.aclose()


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
async def test_an_accepted_connection_shortens_the_turns_of_the_others() -> None:
    """Was: A new connection took as many full turns of floods as its handshake takes passes of the loop."""
    turns = Turns(lambda: 0.0)
    share_turns(turns)
    (listener, *others), (address, *_) = await tcp.listen("tcp", "127.0.0.1", 0)
    async with listener:
        await turns.wait()
        before = turns.allowance
        with socket.create_connection(("127.0.0.1", port_of(address))):
            async with await listener.accept():
                await turns.wait()
    assert turns.allowance < before
    for other in others:
        await other.aclose()
