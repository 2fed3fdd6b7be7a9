"""Conversations that are cancelled at any step, on either side, and the checks that must pass afterwards.

A run sets up a server and a client, starts a conversation of one kind, and cancels one of its sides at a step. Steps of
all tasks of the process are counted: the caller's, the handler's and those of both connections. So every interleaving
that a cancellation can meet has a number. Afterwards the run checks that

- the conversation has ended on both sides, because the other side learned of the cancellation,
- no handler runs, no channel is open and no task is left,
- calls that ran at the same time got their own results.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, Literal

import attrs
import trio
import trio.testing

import muxkit
from muxkit import rpc
from tests._tasks import living_tasks
from tests.rpc.orders import Order, Orders, OrdersService

Target = Literal["caller", "handler", "server"]
PROTOCOLS: Final = ("bpmux", "relink", "aqueduct", "e3x", "yamux")
TARGETS: Final[tuple[Target, ...]] = ("caller", "handler", "server")
OPEN: Final = muxkit.Limits(resets_per_second=1_000_000, resets_burst=1_000_000)
NEIGHBOUR: Final = "neighbour"  # the header of their calls
NEIGHBOURS: Final = 5  # calls that run at the same time
PATIENCE: Final = 600.0  # s of virtual time, in which a conversation must end
JSON: Final = muxkit.Json(Order)

LEARNED: Final = (
    rpc.Error,
    muxkit.LinkLost,
    muxkit.ChannelCancelled,
    muxkit.ChannelStopped,
    trio.EndOfChannel,
    StopAsyncIteration,
)
"""Errors by which a caller learns that the other side was cancelled."""


# --- the kinds of conversations, from the caller's side


async def unary(session: muxkit.Session) -> None:
    order = await rpc.client(Orders, session).get(7)
    assert order == Order(7)


async def failing(session: muxkit.Session) -> None:
    try:
        await rpc.client(Orders, session).get(404)
    except rpc.Error as error:
        if error.code is not rpc.Code.NOT_FOUND:
            raise


async def server_stream(session: muxkit.Session) -> None:
    async with rpc.client(Orders, session).watch(1, upto=4) as updates:
        assert [order.id async for order in updates] == [1, 2, 3]


async def left_early(session: muxkit.Session) -> None:
    async with rpc.client(Orders, session).watch(1) as updates:
        assert (await updates.__anext__()).id == 1


async def client_stream(session: muxkit.Session) -> None:
    assert await rpc.client(Orders, session).upload(rpc.Stream([Order(1), Order(2), Order(3)])) == 6


async def both_streams(session: muxkit.Session) -> None:
    async with rpc.client(Orders, session).double(rpc.Stream([Order(1), Order(2)])) as doubled:
        assert [order.id async for order in doubled] == [2, 4]


async def subscription(session: muxkit.Session) -> None:
    async with session.subscribe("topic", codec=JSON, since=0) as updates:
        assert [(await updates.__anext__()).id for _ in range(2)] == [1, 2]


async def typed_channel(session: muxkit.Session) -> None:
    async with session.open("typed", codec=JSON) as channel:
        await channel.send(Order(3))
        assert await channel.receive() == Order(6)
        await channel.finish()
        assert [each async for each in channel] == []


async def plain_channel(session: muxkit.Session) -> None:
    async with session.open("plain") as channel:
        await channel.send_many([b"1", b"2"])
        assert await channel.receive() == b"1"
        assert await channel.receive() == b"2"


Kind = Callable[[muxkit.Session], Awaitable[None]]
KINDS: Final[tuple[Kind, ...]] = (
    unary,
    failing,
    server_stream,
    left_early,
    client_stream,
    both_streams,
    subscription,
    typed_channel,
    plain_channel,
)


# --- the server


@muxkit.handler(Order)
async def double_orders(channel: muxkit.TypedChannel[Order]) -> None:
    async for order in channel:
        await channel.send(Order(2 * order.id))


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


@asynccontextmanager
async def _marked(call: rpc.Call) -> AsyncIterator[None]:
    """Mark a call of a neighbour, whose handler isn't cancelled."""
    call.headers[NEIGHBOUR] = "yes"
    yield


@attrs.define(eq=False)
class _Handler:
    """The handler of all channels. It runs the swept conversation in a scope, which can be cancelled."""

    serve: Callable[[muxkit.Channel], Awaitable[object]]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    is_armed: bool = False
    running: int = 0

    async def __call__(self, channel: muxkit.Channel) -> None:
        self.running += 1
        try:
            if self.is_armed and NEIGHBOUR not in channel.headers:
                self.is_armed = False
                with self.scope:
                    await self.serve(channel)
                if self.scope.cancelled_caught:
                    channel.abort("the handler was cancelled")
            else:
                await self.serve(channel)
        finally:
            self.running -= 1


class _Steps(trio.abc.Instrument):
    """Counts the steps of all tasks, and cancels a scope at one of them."""

    def __init__(self, step: int, scope: trio.CancelScope) -> None:
        self.count = 0
        self._step = step
        self._scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1
        if self.count == self._step:
            self._scope.cancel()


async def run_once(protocol: str, kind: Kind, target: Target, step: int) -> int:
    """Run a conversation, cancel a side of it at a step, and check the rest. Return the number of its steps.

    The steps end with the conversation, or with `step` if it ends before.
    """
    service = OrdersService()
    topic = muxkit.Topic(Order)
    for id in (1, 2):
        topic.publish_nowait(Order(id))
    channels: dict[str, muxkit.ChannelHandler] = {"topic": topic, "typed": double_orders, "plain": echo}
    handler = _Handler(rpc.serve(service, channels=channels))
    living = living_tasks()
    caller, server_scope = trio.CancelScope(), trio.CancelScope()
    scope = {"caller": caller, "handler": handler.scope, "server": server_scope}[target]
    steps = _Steps(step, scope)

    async def client(url: str) -> None:
        try:
            async with muxkit.connect(url, limits=OPEN) as session:
                await _converse(session)
        except muxkit.LinkLost:
            if target != "server":
                raise
        finally:
            server_scope.cancel()

    async def _converse(session: muxkit.Session) -> None:
        await unary(session)  # so that the connection and its handler have begun
        await trio.testing.wait_all_tasks_blocked()
        neighbours: set[int] = set()
        async with trio.open_nursery() as nursery:
            for id in range(NEIGHBOURS):
                nursery.start_soon(partial(_neighbour, session, 1000 + id, neighbours))
            handler.is_armed = target == "handler"
            trio.lowlevel.add_instrument(steps)
            try:
                with trio.fail_after(PATIENCE), caller:
                    with suppress(*(LEARNED if target != "caller" else ())):
                        await kind(session)
            finally:
                trio.lowlevel.remove_instrument(steps)
                handler.is_armed = False
        if target == "server":
            return
        assert len(neighbours) == NEIGHBOURS
        await kind(session)  # the same conversation works afterwards
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (service.running, handler.running, topic.subscribers) == (0, 0, 0)
        assert [*session.channels()] == []
        assert [channel for each in server.sessions() for channel in each.channels()] == []

    async def _neighbour(session: muxkit.Session, id: int, done: set[int]) -> None:
        with suppress(*(LEARNED if target == "server" else ())):
            order = await rpc.client(Orders, session, interceptors=[_marked]).get(id)
            assert order.id == id  # no reply reaches another caller
            done.add(id)

    async with trio.open_nursery() as nursery:
        with server_scope:
            async with muxkit.open_server(handler, f"{protocol}+mem://sweep", limits=OPEN) as server:
                nursery.start_soon(client, server.url)
                await trio.sleep_forever()
    assert (service.running, handler.running, topic.subscribers) == (0, 0, 0)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert living_tasks() == living
    return steps.count


async def sweep(protocol: str, kind: Kind, target: Target, *, samples: int | None, seed: int = 0) -> int:
    """Cancel a side of a conversation at each of its steps, or at some of them. Return the number of runs.

    Args:
        protocol: The protocol.
        kind: One of `KINDS`.
        target: The side that is cancelled: the caller, the handler, or the whole server.
        samples: How many steps to take, chosen by `seed`; None for all.
        seed: A number.

    Raises AssertionError, or the error of a run, with a note that names the step.
    """
    total = await run_once(protocol, kind, target, -1)
    chosen = range(1, total + 2)
    if samples is not None and samples < len(chosen):
        picked = random.Random(f"{seed} {protocol} {kind.__name__} {target}")
        chosen_steps = sorted(picked.sample(chosen, samples))
    else:
        chosen_steps = [*chosen]
    for step in chosen_steps:
        try:
            await run_once(protocol, kind, target, step)
        except BaseException as error:
            error.add_note(f"{target} of {kind.__name__} over {protocol} was cancelled at step {step} of {total}")
            raise
    return len(chosen_steps)
