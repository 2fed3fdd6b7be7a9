"""Check that two idle sessions agree on their channels, and record what a cancelled call did."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from muxkit import ChannelStopped
from muxkit.protocols.bpmux import Kind
from muxkit.runtime.mux_session import connection_of
from muxkit.runtime.pumps.turns import SYSTEM_TASKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from muxkit.protocols.bpmux import Duplex, Engine, Entity, IncomingRequest, Session, Sink, Source
    from tests.protocols.bpmux._pairs import Pair

MIRROR = {Kind.REQUEST_OUT: Kind.REQUEST_IN, Kind.SINK_OUT: Kind.STREAM_IN, Kind.STREAM_OUT: Kind.SINK_IN}

ResultT = TypeVar("ResultT")


class Watched(Generic[ResultT]):
    """A call to make once, and whether it returned."""

    def __init__(self, call: Callable[[], Awaitable[ResultT]]) -> None:
        self._call = call
        self.results: list[ResultT] = []

    async def __call__(self) -> None:
        self.results.append(await self._call())

    @property
    def done(self) -> bool:
        return bool(self.results)


def check_agreement(pair: Pair) -> None:
    """Check that both sides know the same entities and the same credit for each; all tasks must be blocked."""
    for here, there in ((pair.one, pair.other), (pair.other, pair.one)):
        ours, theirs = connection_of(here).engine, connection_of(there).engine
        assert _credit(ours.top_sink, out=True) == _credit(theirs.top_stream, out=False)
        for kind, mirror in MIRROR.items():
            sends = kind is Kind.SINK_OUT
            assert _known(ours, kind, out=sends) == _known(theirs, mirror, out=not sends), f"{kind.name} differs"


def _known(engine: Engine, kind: Kind, *, out: bool) -> dict[int, int]:
    return {id: _credit(entity, out=out) for id, entity in engine.entities(kind).items() if id}


def _credit(entity: Entity, *, out: bool) -> int:
    if entity.gone:
        return -1
    return entity.credit_out if out else entity.credit_in


def tasks_alive() -> set[trio.lowlevel.Task]:
    """Return every task of the run, except those that muxkit starts once in each run."""
    found: set[trio.lowlevel.Task] = set()
    root = trio.lowlevel.current_root_task()
    rest = [] if root is None else [root]
    while rest:
        task = rest.pop()
        if task.name not in SYSTEM_TASKS:
            found.add(task)
        for nursery in task.child_nurseries:
            rest += nursery.child_tasks
    return found


# --- actions of the other side

LATER = 1.0  # s of virtual time, after which all tasks are blocked


@asynccontextmanager
async def reading_later(session: Session) -> AsyncIterator[list[bytes]]:
    """Read the next source to its end some time later; the block ends when that is done."""
    source, _ = await anext(session.sources())
    got: list[bytes] = []

    async def read() -> None:
        await trio.sleep(LATER)
        got.extend([message async for message in source])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        yield got


async def answer_later(asked: IncomingRequest) -> None:
    """Answer the next request with its payload, doubled, some time later."""
    await trio.sleep(LATER)
    with suppress(ChannelStopped):
        await asked.respond(asked.payload * 2)


async def close_what_comes(session: Session) -> None:
    """Accept everything that the peer opens, and close it at once."""

    async def close_each(ones: AsyncIterator[Duplex | IncomingRequest]) -> None:
        async for one in ones:
            one.abort()

    async def close_firsts(pairs: AsyncIterator[tuple[Sink | Source, bytes]]) -> None:
        async for one, _ in pairs:
            await one.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(close_each, session.incoming())
        nursery.start_soon(close_each, session.requests())
        nursery.start_soon(close_firsts, session.sources())
        nursery.start_soon(close_firsts, session.sinks())


async def both(*calls: Callable[[], Awaitable[object]]) -> None:
    """Run all calls at once."""
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(call)


async def round_trip(here: Duplex, there: Duplex) -> None:
    """Echo a message on a channel that is open at both ends."""
    for sender, receiver in ((here, there), (there, here)):
        await sender.send(b"round trip")
        assert await receiver.receive() == b"round trip"
