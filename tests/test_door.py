"""A URL is all that it takes to connect and to serve."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

import muxkit
import muxkit_adapters
from muxkit import Channel, Limits, LinkLost, Session
from muxkit._plugins import PluginError
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Config
from muxkit_adapters import memory
from tests.protocols.bpmux._helpers import sender_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from trio.testing import MockClock

    Handler = Callable[[Session], Awaitable[object]]


async def echo(channel: Channel) -> None:
    async for message in channel:
        await channel.send(message)


ECHO = muxkit.each_channel(echo)


async def talk(session: Session, message: bytes = b"hello") -> None:
    async with session.open() as channel:
        await channel.send(message)
        assert await channel.receive() == message


async def serving(
    nursery: trio.Nursery, handler: Handler = ECHO, url: str = "bpmux+mem://door", **options: Any
) -> muxkit.Server:
    served: muxkit.Server = await nursery.start(partial(muxkit.serve, handler, url, **options))
    return served


@pytest.mark.parametrize(
    "url", ["bpmux+mem://door", "bpmux+tcp://127.0.0.1:0", "bpmux+unix://{tmp}/s", "bpmux+ws://127.0.0.1:0/mux"]
)
async def test_a_url_is_served_and_connected_to(url: str, tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        served = await serving(nursery, url=url.format(tmp=tmp_path))
        assert not served.url.endswith(":0")
        assert served.urls == (served.url,)
        async with muxkit.connect(served.url) as session:
            await talk(session)
            assert len(served.sessions()) == 1
            assert session.info.protocol == "bpmux"
        await served.shutdown(grace=1)
        assert len(served.sessions()) == 0


@pytest.mark.parametrize("url", ["", "bpmux", "tcp://x", "bpmux+://x", "+tcp://x", "bpmux+tcp:x", "bpmux+tcp"])
async def test_a_url_of_another_form_is_refused_with_the_form(url: str) -> None:
    with pytest.raises(ValueError, match=r"invalid URL .*: expected protocol\+transport://address"):
        async with muxkit.connect(url):
            pass
    with pytest.raises(ValueError, match="invalid URL"):
        await muxkit.serve(muxkit.each_channel(echo), url)


async def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(PluginError, match="no protocol 'nope'"):
        async with muxkit.connect("nope+tcp://127.0.0.1:1"):
            pass
    with pytest.raises(PluginError, match="no transport 'nope'"):
        await muxkit.serve(muxkit.each_channel(echo), "bpmux+nope://x")


async def test_options_go_to_the_protocol_or_to_the_transport() -> None:
    async with trio.open_nursery() as nursery:
        served = await serving(nursery, config=Config(letter=True))
        async with muxkit.connect(served.url, config=Config(letter=True), capacity=10) as session:
            await talk(session)
        with pytest.raises(TypeError, match="colour"):
            async with muxkit.connect(served.url, colour="red"):  # type: ignore[call-arg]  # the mistake
                pass
        nursery.cancel_scope.cancel()


async def test_limits_reach_the_session() -> None:
    async with trio.open_nursery() as nursery:
        served = await serving(nursery, limits=Limits(channel_bytes=100, channel_floor=100))
        async with muxkit.connect(served.url) as session, session.open() as channel:
            await trio.testing.wait_all_tasks_blocked()
            assert isinstance(channel, bpmux.Duplex)
            assert sender_of(channel).credit_out == 100
        nursery.cancel_scope.cancel()


class _Deaf:
    """An observer that does not listen."""

    def frame(self, *_: object) -> None: ...

    credit = state = timer = error = transport = frame


class _Watchers(_Deaf):
    """Wants an observer of its own for each connection."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def connection(self, name: str = "") -> _Deaf:
        self.names.append(name)
        return _Deaf()


@pytest.mark.parametrize(
    ("url", "servers", "clients"),
    [
        ("bpmux+tcp://127.0.0.1:0", r"server tcp 127\.0\.0\.1:\d+", r"client tcp 127\.0\.0\.1:\d+"),
        ("relink+tcp://127.0.0.1:0/orders", "server orders", r"client 127\.0\.0\.1:\d+"),
    ],
)
async def test_an_observer_of_many_connections_is_asked_for_one_for_each(url: str, servers: str, clients: str) -> None:
    there, here = _Watchers(), _Watchers()
    async with trio.open_nursery() as nursery:
        served = await serving(nursery, ECHO, url, observer=there)
        for _ in range(2):
            async with muxkit.connect(served.url, observer=here) as session:
                await talk(session)
        nursery.cancel_scope.cancel()
    assert [re.fullmatch(servers, name) is not None for name in there.names] == [True, True], there.names
    assert [re.fullmatch(clients, name) is not None for name in here.names] == [True, True], here.names


@pytest.mark.requirement("R-36")
async def test_a_blocks_own_error_comes_out_bare() -> None:
    async with trio.open_nursery() as nursery:
        served = await serving(nursery)

        async def fail() -> None:
            async with muxkit.connect(served.url):
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await fail()
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-36")
async def test_a_handler_that_fails_ends_its_own_session_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(session: Session) -> None:
        async for channel in session.incoming():
            if await channel.receive() == b"fail":
                raise RuntimeError("handler fault")
            await channel.send(b"fine")

    async def fail(url: str) -> None:
        async with muxkit.connect(url) as session, session.open() as channel:
            await channel.send(b"fail")
            await channel.receive()

    async with trio.open_nursery() as nursery:
        served = await serving(nursery, handle)
        async with muxkit.connect(served.url) as other:
            with pytest.raises(LinkLost):
                await fail(served.url)
            async with other.open() as channel:
                await channel.send(b"x")
                assert await channel.receive() == b"fine"
        await served.shutdown(grace=1)
    assert "the handler of a session failed" in caplog.text
    assert "handler fault" in caplog.text


@pytest.mark.requirement("R-36", "R-10")
async def test_a_channel_handler_that_fails_aborts_its_own_channel_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handle(channel: Channel) -> None:
        if await channel.receive() == b"fail":
            raise RuntimeError("channel fault")
        await channel.send(b"fine")

    async with trio.open_nursery() as nursery:
        served = await serving(nursery, muxkit.each_channel(handle))
        async with muxkit.connect(served.url) as session:
            async with session.open() as failing, session.open() as fine:
                await failing.send(b"fail")
                with pytest.raises(trio.BrokenResourceError):
                    await failing.receive()
                await fine.send(b"x")
                assert await fine.receive() == b"fine"
                with pytest.raises(trio.EndOfChannel):
                    await fine.receive()
        await served.shutdown(grace=1)
    assert "the handler of a channel failed" in caplog.text


async def test_a_lost_session_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "muxkit")
    async with trio.open_nursery() as nursery:
        served = await serving(nursery, url="bpmux+tcp://127.0.0.1:0")
        with suppress(ValueError):
            async with muxkit.connect(served.url) as session, session.open() as channel:
                await channel.send(b"x")
                raise ValueError
        await served.shutdown(grace=1)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.requirement("R-42")
async def test_shutdown_waits_for_sessions_that_are_still_taking_leave(autojump_clock: MockClock) -> None:
    """One session ends at once; the other's handler is done, but its peer has not heard the last words yet."""
    async with trio.open_nursery() as nursery:
        served = await serving(nursery, linger=5)
        async with muxkit.connect(served.url), memory.connect("door") as slow:
            await trio.testing.wait_all_tasks_blocked()
            assert len(served.sessions()) == 2
            start = trio.current_time()
            nursery.start_soon(partial(served.shutdown, grace=60))
            while await slow.receive_some():
                pass
            assert trio.current_time() - start == pytest.approx(5)


async def test_shutdown_ends_within_the_grace_and_then_cuts(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        served = await serving(nursery)
        with suppress(LinkLost):
            async with muxkit.connect(served.url) as session, session.open() as channel:
                await talk(session)
                start = trio.current_time()
                await served.shutdown(grace=3)
                assert trio.current_time() - start == pytest.approx(3)
                with pytest.raises(trio.BrokenResourceError):
                    await channel.receive()


async def test_a_server_that_shuts_down_takes_no_new_sessions(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        served = await serving(nursery)
        async with muxkit.connect(served.url) as session, session.open() as channel:
            await channel.send(b"x")
            nursery.start_soon(partial(served.shutdown, grace=10))
            await trio.sleep(1)
            with pytest.raises((trio.BrokenResourceError, trio.EndOfChannel)):
                async with muxkit.connect(served.url) as late:
                    await talk(late)
            assert len(served.sessions()) == 1
            await channel.aclose()


async def test_a_cancelled_server_closes_its_sessions() -> None:
    async with trio.open_nursery() as nursery:
        served = await serving(nursery)
        async with muxkit.connect(served.url) as session:
            await talk(session)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                assert [item async for item in session.incoming()] == []


def test_the_names_of_the_package_come_when_they_are_asked_for() -> None:
    assert {"connect", "serve", "Session", "Channel", "LinkLost"} <= set(dir(muxkit))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        muxkit.nope  # type: ignore[attr-defined]  # noqa: B018 - the name is the point


async def test_a_protocol_without_channels_is_refused_before_anybody_connects() -> None:
    """Was: `muxkit.serve(h, "restream+tcp://…")` started, and failed with the first client."""
    async with trio.open_nursery() as nursery:
        with pytest.raises(muxkit.Unsupported, match=r"restream has no channels: use restream\.serve"):
            await muxkit.serve(muxkit.each_channel(echo), "restream+tcp://127.0.0.1:0")
        with pytest.raises(muxkit.Unsupported, match=r"restream has no channels"):
            async with muxkit.connect("restream+tcp://127.0.0.1:1"):
                raise AssertionError
        nursery.cancel_scope.cancel()


def test_a_program_of_asyncio_reads_that_muxkit_runs_on_trio() -> None:
    """Was: "RuntimeError: must be called from async context"."""

    async def main() -> None:
        async with muxkit.connect("bpmux+tcp://127.0.0.1:1"):
            raise AssertionError

    with pytest.raises(
        RuntimeError, match=r"muxkit runs on Trio.*In a program of asyncio, use muxkit\.asyncio\.connect"
    ):
        asyncio.run(main())


def test_errors_and_warnings_of_transports_are_names_of_the_package() -> None:
    """Was: HandshakeFailed and PlaintextWarning were documented names without a place to import them from."""
    assert issubclass(muxkit.HandshakeFailed, ConnectionError)
    assert issubclass(muxkit.PlaintextWarning, UserWarning)
    assert muxkit_adapters.HandshakeFailed is muxkit.HandshakeFailed
    assert muxkit_adapters.PlaintextWarning is muxkit.PlaintextWarning


async def test_an_observer_needs_only_the_methods_that_it_is_interested_in() -> None:
    """Was: "AttributeError: 'Bad' object has no attribute 'credit'" out of the block of a session."""

    class Errors(muxkit.BaseObserver):
        def error(self, error: BaseException) -> None:
            raise error

    async with trio.open_nursery() as nursery:
        served = await serving(nursery)
        async with muxkit.connect(served.url, observer=Errors()) as session:
            await talk(session)
        nursery.cancel_scope.cancel()
