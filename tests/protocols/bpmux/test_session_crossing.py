"""Both sides act at the same moment: every pair of actions ends, and both sides agree afterwards."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from muxkit import ChannelCancelled, ChannelStopped
from muxkit.core import Receiving, Sending
from muxkit.protocols import bpmux
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import replay
from muxkit_adapters import memory
from tests.protocols.bpmux._pairs import Pair, at_rest, next_duplex, next_request
from tests.protocols.bpmux._sessions import check_agreement

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from muxkit.protocols.bpmux import Duplex, IncomingRequest, Request, Session

PATIENCE = 60.0  # s of virtual time; only a call that hangs takes any

# Errors of an action when the other side acted first. A lost link is none of them.
CROSSED = (ChannelStopped, ChannelCancelled, trio.ClosedResourceError, trio.EndOfChannel)


@attrs.define
class Side:
    """The channels and requests of one side when the race begins."""

    session: Session
    channel: Duplex
    request: Request
    asked: IncomingRequest
    may_leave: trio.Event = attrs.Factory(trio.Event)


async def open_one(side: Side) -> None:
    async with side.session.open() as channel:
        await channel.send(b"new")


async def send(side: Side) -> None:
    await side.channel.send(b"message")


async def finish(side: Side) -> None:
    await side.channel.finish()


async def aclose(side: Side) -> None:
    await side.channel.aclose()


async def abort(side: Side) -> None:
    side.channel.abort()


async def stop(side: Side) -> None:
    await side.channel.source.aclose()


async def cancel_request(side: Side) -> None:
    side.request.abort()


async def respond(side: Side) -> None:
    await side.asked.respond(b"answer")


async def decline(side: Side) -> None:
    await side.asked.decline()


async def ping(side: Side) -> None:
    for one in (side.session, side.channel):
        assert await one.ping() >= 0


async def shutdown(side: Side) -> None:
    await side.session.shutdown(grace=0)


async def leave(side: Side) -> None:
    side.may_leave.set()


ACTIONS: dict[str, Callable[[Side], Awaitable[None]]] = {
    action.__name__: action
    for action in (
        open_one, send, finish, aclose, abort, stop, cancel_request, respond, decline, ping, shutdown, leave
    )
}  # fmt: skip


class Race:
    """Two sides with a channel between them and a request each way, which act at the same moment."""

    def __init__(self) -> None:
        self._sessions: list[Session] = []
        self._left = 0

    async def run(self, *actions: Callable[[Side], Awaitable[None]]) -> None:
        links = memory.pair()
        leaving = (trio.Event(), trio.Event())
        async with trio.open_nursery() as nursery:
            for link, may_leave in zip(links, leaving, strict=True):
                await nursery.start(self._live, link, may_leave)
            self.sides = await self._meet(leaving)
            async with trio.open_nursery() as racers:
                for side, action in zip(self.sides, actions, strict=True):
                    racers.start_soon(self._act, side, action)
            await at_rest()
            if not any(may_leave.is_set() for may_leave in leaving):
                check_agreement(Pair(*self._sessions))
                self._check_halves()
            for may_leave in leaving:
                may_leave.set()
        for session in self._sessions:
            assert connection_of(session).engine.live == 0

    async def _live(self, link: trio.abc.Stream, may_leave: trio.Event, task_status: trio.TaskStatus[None]) -> None:
        async with bpmux.session(link) as session:
            self._sessions.append(session)
            task_status.started()
            await may_leave.wait()

    async def _meet(self, leaving: tuple[trio.Event, trio.Event]) -> tuple[Side, Side]:
        one, other = self._sessions
        here = await one.open().__aenter__()
        there = await next_duplex(other)
        question = await one.open_request(b"?").__aenter__()
        counter = await other.open_request(b"?").__aenter__()
        asked, countered = await next_request(other), await next_request(one)
        await at_rest()
        return Side(one, here, question, countered, leaving[0]), Side(other, there, counter, asked, leaving[1])

    async def _act(self, side: Side, action: Callable[[Side], Awaitable[None]]) -> None:
        with suppress(*CROSSED):
            await action(side)

    def _check_halves(self) -> None:
        """A channel that one side has ended is not waited for by the other."""
        for here, there in (self.sides, self.sides[::-1]):
            sink, source = here.channel.sink, there.channel.source
            if sink.state is Sending.OPEN:
                assert source.state is Receiving.OPEN
            else:
                assert sink.state is Sending.CLOSED
                assert source.state is not Receiving.OPEN


@pytest.mark.requirement("R-44")
@pytest.mark.seeds(2, soak=100)
@pytest.mark.parametrize("theirs", ACTIONS)
@pytest.mark.parametrize("ours", ACTIONS)
async def test_both_at_the_same_moment(ours: str, theirs: str, seed: int, autojump_clock: MockClock) -> None:
    with replay(seed), trio.fail_after(PATIENCE):
        await Race().run(ACTIONS[ours], ACTIONS[theirs])
