"""What a hostile peer may do to calls, typed channels and topics, and the server that it does it to.

Each attack uses a session of its own, as a client that keeps the protocol's rules but abuses what runs above it. The
attacks are used by `test_hostile.py` with small amounts in one process, and by `tests/soak/hostile_calls.py` with large
amounts over sockets.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, get_args

import trio
from google.protobuf.timestamp_pb2 import Timestamp

import muxkit
from muxkit import rpc
from muxkit.topics import OnLag
from tests.rpc.orders import Order, Orders, OrdersService

ENDED: Final = (muxkit.ChannelCancelled, muxkit.ChannelStopped, trio.EndOfChannel)
BATCH: Final = 200  # channels that an attack has open at the same time
BOMB: Final = 64 * 1024 * 1024  # bytes to which a small message expands
ORDER: Final = Order(7)
CODECS: Final[dict[str, Any]] = {
    "json": muxkit.Json(Order),
    "msgpack": muxkit.MessagePack(Order),
    "json+zstd": muxkit.Zstd(muxkit.Json(Order)),
    "msgpack+zstd": muxkit.Zstd(muxkit.MessagePack(Order)),
}


# --- the server


class Hostile:
    """The handler of a server with calls, typed channels and a topic, and its counters."""

    def __init__(self) -> None:
        self.service = OrdersService()
        self.topic = muxkit.Topic(Order, keep=64)
        channels: dict[str, muxkit.ChannelHandler] = {
            "orders": _orders,
            "time": _time,
            "topic": self.topic,
            "echo": _echo,
        }
        self.handle: muxkit.ChannelHandler = rpc.serve(self.service, channels=channels)

    async def publish_all_the_time(self) -> None:
        """Publish orders as long as the server runs."""
        for id in range(1 << 30):
            await self.topic.publish(Order(id, "tea" * 100))
            await trio.sleep(0.002)


@muxkit.handler(Order)
async def _orders(channel: muxkit.TypedChannel[Order]) -> None:
    async for order in channel:
        await channel.send(order)


@muxkit.handler(muxkit.Protobuf(Timestamp))
async def _time(channel: muxkit.TypedChannel[Timestamp]) -> None:
    async for time in channel:
        await channel.send(time)


async def _echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


# --- the attacks


async def abandoned_calls(session: muxkit.Session, amount: int, seed: int) -> None:
    """Open calls that wait for an hour, and give them up."""
    orders = rpc.client(Orders, session)
    for _ in range(-(-amount // BATCH)):
        async with trio.open_nursery() as nursery:
            for _ in range(BATCH):
                nursery.start_soon(orders.wait, 3600)
            await trio.sleep(0.02)  # they are under way, and some have reached their handlers
            nursery.cancel_scope.cancel()


async def malformed_messages(session: muxkit.Session, amount: int, seed: int) -> None:
    """Send messages that don't fit, or are damaged, with every codec: one to each channel, which it costs."""
    choose = random.Random(seed)
    for _ in range(amount):
        name = choose.choice([*CODECS, "protobuf"])
        valid = _valid_message(name)
        async with session.open("time" if name == "protobuf" else "orders", headers={"codec": name}) as channel:
            with suppress(*ENDED):
                await channel.send(_damaged(valid, choose))
                await channel.receive()
    async with session.open("orders", codec=CODECS["json"]) as channel:  # this session goes on
        await channel.send(ORDER)
        assert await channel.receive() == ORDER


async def malformed_calls(session: muxkit.Session, amount: int, seed: int) -> None:
    """Call with damaged arguments, damaged items of streams, damaged deadlines, and names that no method has."""
    choose = random.Random(seed)
    for _ in range(amount):
        codec = choose.choice([*CODECS])
        arguments = _damaged(b'{"rows":1,"factor":3}', choose)
        headers = {"codec": codec, "timeout": choose.choice(["5", "-1", "nan", "1e400", "soon"])}
        name = choose.choice(["rpc:Orders.upload", "rpc:Orders.get", "rpc:Orders.", "rpc:", "rpc:" + "x" * 250])
        async with session.open(name, payload=arguments, headers=headers) as channel:
            with suppress(*ENDED):
                await channel.send(_damaged(b"\0" + _valid_message(codec), choose))
                await channel.receive()
    assert await rpc.client(Orders, session).get(7) == ORDER


async def compression_bombs(session: muxkit.Session, amount: int, seed: int) -> None:
    """Send small messages that expand to 64 MiB."""
    bomb = muxkit.Zstd(muxkit.Json(str)).encode("x" * BOMB)
    for _ in range(amount):
        async with session.open("orders", headers={"codec": "json+zstd"}) as channel:
            with suppress(*ENDED):
                await channel.send(bomb)
                await channel.receive()
                raise AssertionError("the server has answered a compression bomb")


async def silent_subscribers(session: muxkit.Session, amount: int, seed: int) -> None:
    """Subscribe with each policy and never read."""
    policies = [policy for policy in get_args(OnLag) if policy != "wait"]
    async with trio.open_nursery() as nursery:
        for number in range(amount):
            await nursery.start(partial(_subscribe_only, session, policies[number % len(policies)]))
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()


async def _subscribe_only(
    session: muxkit.Session, policy: OnLag, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    async with session.subscribe("topic", codec=CODECS["json"], since=0, on_lag=policy):
        task_status.started()
        await trio.sleep_forever()


async def headers_at_their_bounds(session: muxkit.Session, amount: int, seed: int) -> None:
    """Open channels with headers of the largest size, larger ones, very many pairs, and odd keys."""
    most = session.limits.headers
    frame = 6  # bytes of MessagePack around one long value with a key of one character
    for number in range(amount):
        match number % 4:
            case 0:
                headers = {"k": "x" * (most - frame)}
            case 1:
                headers = {f"{key:03}": "" for key in range((most - 3) // 6)}
            case 2:
                headers = {"": "", "codec": "\0" * 100, "timeout": "🫖" * 50, "traceparent": "x" * 100}
            case _:
                headers = {"k": "x" * (most - frame + 1)}  # one byte too many: this side refuses to send it
                try:
                    session.open("echo", headers=headers)
                except muxkit.LocalProtocolError:
                    continue
                raise AssertionError("headers above the limit were sent")
        async with session.open("echo", headers=headers) as channel:
            await channel.send(b"1")
            assert await channel.receive() == b"1"


Attack = Callable[[muxkit.Session, int, int], Awaitable[None]]
ATTACKS: Final[tuple[Attack, ...]] = (
    abandoned_calls,
    malformed_messages,
    malformed_calls,
    compression_bombs,
    silent_subscribers,
    headers_at_their_bounds,
)


def _valid_message(codec: str) -> bytes:
    encoded: bytes = Timestamp(seconds=5).SerializeToString() if codec == "protobuf" else CODECS[codec].encode(ORDER)
    return encoded


def _damaged(message: bytes, choose: random.Random) -> bytes:
    """Return a message with some damage, or something that isn't one at all."""
    match choose.randrange(5):
        case 0:
            return choose.randbytes(choose.randrange(200))
        case 1:
            return message[: choose.randrange(len(message))]
        case 2:
            at = choose.randrange(len(message))
            return message[:at] + choose.randbytes(1) + message[at + 1 :]
        case 3:
            return choose.choice([b"[", b"\x91", b'{"id":', b"\xff"]) * choose.randrange(1, 10_000)
        case _:
            return message + choose.randbytes(choose.randrange(1, 20))


# --- the neighbour


async def served_meanwhile(session: muxkit.Session, done: trio.Event) -> list[float]:
    """Make calls and read a topic until the event is set. Return how long each call took, in seconds."""
    orders = rpc.client(Orders, session)
    took: list[float] = []
    async with session.subscribe("topic", codec=CODECS["json"], on_lag="drop") as updates:
        while not done.is_set() or not took:
            began = trio.current_time()
            order = await orders.get(1000 + len(took))
            took.append(trio.current_time() - began)
            assert order.id == 999 + len(took)
            await updates.__anext__()
    return took
