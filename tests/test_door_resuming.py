"""A URL also opens sessions that outlive their connections: Relink through `muxkit.connect` and `muxkit.serve`."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

import muxkit
from muxkit import Channel, Limits, LinkLost, Session
from muxkit.protocols import relink
from muxkit.protocols.relink import Config, EpochChanged, Keep, Link, LinkChanged, LinkReplaced
from muxkit.runtime import Backoff
from muxkit.testing import ChaosPlan, ChaosRelay, chaos_relay
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from trio.testing import MockClock

    Handler = Callable[[Session], Awaitable[object]]

SOON = Backoff(first=0.01, most=0.1)
QUIET = Config(keepalive=None)


async def echo(channel: Channel) -> None:
    async for message in channel:
        await channel.send(message)


ECHO = muxkit.each_channel(echo)


async def serving(nursery: trio.Nursery, handler: Handler, url: str, **options: Any) -> muxkit.Server:
    served: muxkit.Server = await nursery.start(partial(muxkit.serve, handler, url, **options))
    return served


async def instance(nursery: trio.Nursery, handler: Handler, url: str, **options: Any) -> trio.CancelScope:
    """A server that can be ended without a word."""
    scope = trio.CancelScope()

    async def run(task_status: trio.TaskStatus[muxkit.Server]) -> None:
        with scope:
            await muxkit.serve(handler, url, task_status=task_status, **options)

    await nursery.start(run)
    return scope


def relayed(url: str, relay: ChaosRelay) -> str:
    """The same URL with the relay's address in it."""
    scheme, _, rest = url.partition("://")
    if scheme.endswith("+unix"):
        return f"{scheme}://{relay.address}?{rest.partition('?')[2]}"
    ends = [rest.index(sign) for sign in "/?" if sign in rest]
    return f"{scheme}://{relay.address}{rest[min(ends) :]}"


def target_of(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return rest.partition("?")[0] if scheme.endswith("+unix") else rest.partition("/")[0].partition("?")[0]


TRANSPORTS = [
    ("relink+tcp://127.0.0.1:0/jobs", "/jobs"),
    ("relink+tcp://127.0.0.1:0?endpoint=jobs", "/jobs"),
    ("relink+ws://127.0.0.1:0/mux?endpoint=jobs", "/mux?endpoint=jobs"),
    pytest.param(
        "relink+unix://{tmp}/s?endpoint=jobs",
        "/s?endpoint=jobs",
        marks=pytest.mark.skipif(sys.platform == "win32", reason="has none"),
    ),
]


@pytest.mark.requirement("R-51")
@pytest.mark.parametrize(("url", "end"), TRANSPORTS)
async def test_a_session_by_url_heals_when_its_connection_is_cut(url: str, end: str, tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        served = await serving(nursery, ECHO, url.format(tmp=tmp_path))
        assert served.url.endswith(end)
        listen = str(tmp_path / "relay") if "+unix" in url else "127.0.0.1:0"
        async with chaos_relay(target_of(served.url), ChaosPlan(), listen=listen) as relay:
            async with relink.connect(relayed(served.url, relay), backoff=SOON) as session, session.open() as channel:
                for number in range(4):
                    await channel.send(b"%d" % number)
                    assert await channel.receive() == b"%d" % number
                    assert len(served.sessions()) == 1
                    if number < 3:
                        relay.cut_all()
            assert isinstance(session, Link)
            assert session.connections == 4
        await served.shutdown(grace=5)
        assert len(served.sessions()) == 0


async def test_a_session_by_url_is_there_before_anybody_answers(autojump_clock: MockClock) -> None:
    async with relink.connect("relink+mem://late/jobs", backoff=SOON) as session:
        async with session.open() as channel, trio.open_nursery() as nursery:
            await channel.send(b"early")
            await trio.sleep(5)
            served = await serving(nursery, ECHO, "relink+mem://late/jobs")
            assert await channel.receive() == b"early"
            await channel.aclose()
            await served.shutdown(grace=1)


async def test_an_endpoint_that_is_not_served_is_not_found(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        await serving(nursery, ECHO, "relink+mem://door/jobs")
        with pytest.raises(LinkLost, match="it may not know the endpoint 'chat'"):
            async with relink.connect("relink+mem://door/chat", patience=5) as session:
                await session.ping()
        nursery.cancel_scope.cancel()


# --- options


async def test_who_connects_has_options_for_dialling_and_is_told_of_changes(autojump_clock: MockClock) -> None:
    failures: list[float] = []
    changes: list[LinkReplaced] = []
    options: dict[str, Any] = {
        "config": QUIET,
        "backoff": Backoff(first=1.0, least=1.0, most=1.0),
        "on_failed": lambda error, pause: failures.append(pause),
        "on_changed": changes.append,
    }
    async with trio.open_nursery() as nursery:
        async with muxkit.connect("relink+mem://options/jobs", **options) as session:
            await trio.sleep(3.5)
            assert failures == [1.0] * 4
            first = await instance(nursery, ECHO, "relink+mem://options/jobs", config=QUIET)
            assert await session.ping() == 0
            first.cancel()
            await trio.sleep(1)
            await instance(nursery, ECHO, "relink+mem://options/jobs", config=QUIET)
            await trio.sleep(2)
            async with session.open() as channel:
                await channel.send(b"x")
                assert await channel.receive() == b"x"
        nursery.cancel_scope.cancel()
    assert [type(change) for change in changes] == [EpochChanged]


async def test_a_change_of_the_link_is_raised_from_what_used_it(autojump_clock: MockClock) -> None:
    async def answer_once(session: Session) -> None:
        channel = await anext(aiter(session))
        await channel.send(await channel.receive())
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        first = await instance(nursery, answer_once, "relink+mem://again/jobs")
        async with relink.connect("relink+mem://again/jobs", backoff=SOON) as session:
            async with session.open() as channel:
                await channel.send(b"x")
                assert await channel.receive() == b"x"
                first.cancel()
                await trio.sleep(1)
                await instance(nursery, ECHO, "relink+mem://again/jobs")
                with pytest.raises(LinkChanged, match="another instance"):
                    await channel.receive()
            async with session.open() as anew:
                await anew.send(b"y")
                assert await anew.receive() == b"y"
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-01")
async def test_who_serves_says_how_much_is_kept_of_absent_sessions(autojump_clock: MockClock) -> None:
    ended: list[BaseException] = []

    async def wait(session: Session) -> None:
        try:
            async for _ in session.incoming():
                pass
        except LinkLost as error:
            ended.append(error)

    async with trio.open_nursery() as nursery:
        served = await serving(nursery, wait, "relink+mem://keep/jobs", keep=Keep(age=60.0), config=QUIET)
        with trio.CancelScope() as scope:
            async with muxkit.connect("relink+mem://keep/jobs", config=QUIET) as session:
                await session.ping()
                scope.cancel()
                await trio.lowlevel.checkpoint()
        await trio.sleep(59)
        assert len(served.sessions()) == 1
        await trio.sleep(2)
        assert len(served.sessions()) == 0
        assert "absent for longer" in str(ended[0])
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-64")
async def test_who_serves_says_who_a_peer_is(autojump_clock: MockClock) -> None:
    """Every client has a new identity each time, so none can come back."""
    ids = iter(range(100))

    async with trio.open_nursery() as nursery:
        await serving(nursery, ECHO, "relink+mem://who/jobs", identify=lambda stream: b"%d" % next(ids), config=QUIET)

        @asynccontextmanager
        async def dial() -> AsyncIterator[trio.abc.Stream]:
            async with memory.connect("who") as stream:
                streams.append(stream)
                yield stream

        streams: list[trio.abc.Stream] = []
        async with relink.link(dial, "jobs", config=QUIET, backoff=SOON) as link:
            await link.connected()
            before = link.id
            await trio.aclose_forcefully(streams[0])
            await trio.sleep(1)
            assert link.id not in (0, before)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", ["keep", "identify"])
async def test_options_of_who_serves_are_not_for_who_connects(name: str) -> None:
    options: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=name):
        async with muxkit.connect("relink+mem://nobody/jobs", **options):
            pass


@pytest.mark.parametrize("name", ["backoff", "patience", "on_failed", "on_changed"])
async def test_options_of_who_connects_are_not_for_who_serves(name: str) -> None:
    options: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=name):
        await muxkit.serve(ECHO, "relink+mem://nobody/jobs", **options)


# --- the end


@pytest.mark.requirement("R-42")
async def test_shutdown_lets_live_sessions_end_also_over_another_connection(autojump_clock: MockClock) -> None:
    answered: list[bytes] = []
    async with trio.open_nursery() as nursery:
        served = await serving(nursery, ECHO, "relink+mem://end/jobs", config=QUIET)
        streams: list[trio.abc.Stream] = []

        @asynccontextmanager
        async def dial() -> AsyncIterator[trio.abc.Stream]:
            async with memory.connect("end") as stream:
                streams.append(stream)
                yield stream

        async with relink.link(dial, "jobs", config=QUIET, backoff=SOON) as link, link.open() as channel:
            await channel.send(b"before")
            answered.append(await channel.receive())
            nursery.start_soon(partial(served.shutdown, grace=60))
            await trio.sleep(1)
            await trio.aclose_forcefully(streams[-1])
            await channel.send(b"after")
            answered.append(await channel.receive())
            assert link.connections == 2
        assert answered == [b"before", b"after"]
    assert trio.current_time() < 10, "it did not have to wait for the end of the grace"
    assert len(served.sessions()) == 0


@pytest.mark.requirement("R-42")
async def test_shutdown_takes_no_new_sessions_and_cuts_absent_ones_after_the_grace(autojump_clock: MockClock) -> None:
    async def stay(_session: Session) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        served = await serving(nursery, stay, "relink+mem://over/jobs", config=QUIET)
        with trio.CancelScope() as scope:
            async with relink.connect("relink+mem://over/jobs", config=QUIET) as gone:
                await gone.ping()
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert len(served.sessions()) == 1
        began = trio.current_time()
        nursery.start_soon(partial(served.shutdown, grace=30))
        with pytest.raises(LinkLost):
            async with relink.connect("relink+mem://over/jobs", config=QUIET, patience=5) as late:
                await late.ping()
        assert len(served.sessions()) == 1
    assert trio.current_time() - began == pytest.approx(30, abs=6)


async def test_limits_reach_the_sessions_of_both_sides(autojump_clock: MockClock) -> None:
    seen: list[Limits] = []
    looked = trio.Event()
    limits = Limits(channels=7)

    async def look(session: Session) -> None:
        seen.append(session.limits)
        looked.set()

    async with trio.open_nursery() as nursery:
        served = await serving(nursery, look, "relink+mem://limits/jobs", limits=limits)
        async with muxkit.connect("relink+mem://limits/jobs", limits=limits) as session:
            assert session.limits is limits
            await looked.wait()
        assert seen == [limits]
        await served.shutdown(grace=1)
