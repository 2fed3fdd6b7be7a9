"""Publish and subscribe: a subscriber sends the channel on which it wants its prices; orders travel beside them."""

import itertools

import trio

from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Client, Mode, Receiver, Sender
from muxkit_adapters import tcp

subscribers: dict[Sender, bytes] = {}  # the channels of subscribers, and what each wants


# --- the market


async def serve(link: trio.abc.Stream) -> None:
    async with aqueduct.connection(link, role="server") as connection, trio.open_nursery() as nursery:
        async for message in connection.entrypoint:
            async with message:  # halves that came with it and are not taken are closed at its end
                if message.payload == b"subscribe":
                    channel = message.sender()
                    subscribers[channel] = dict(channel.headers)[b"symbol"]
                elif message.payload == b"trade":
                    nursery.start_soon(fill, message.receiver(0), message.sender(1))


async def fill(orders: Receiver, fills: Sender) -> None:
    """Execute orders one by one, in the order in which they were given; none may be lost."""
    async with fills:
        async for order in orders:
            await fills.send(b"filled " + order.payload)


async def publish() -> None:
    """Send prices to all subscribers without waiting: a late price is worthless, so the oldest are dropped."""
    for number in itertools.count(1):
        for channel, symbol in [*subscribers.items()]:
            try:
                await channel.send(b"%s %d" % (symbol, number), mode=Mode.UNRELIABLE)
            except trio.BrokenResourceError:  # the subscriber stopped, or is gone
                del subscribers[channel]
        await trio.sleep(0.001)


# --- the traders


async def watch(connection: Client, symbol: bytes) -> None:
    ticks, ticket = connection.channel(headers=[(b"symbol", symbol)])
    async with ticks:
        await connection.entrypoint.send(b"subscribe", attachments=[ticket])
        last = 0
        for _ in range(20):
            name, number = (await ticks.receive()).payload.split()
            assert name == symbol
            assert int(number) > last
            last = int(number)
    print(f"watcher: 20 ticks of {symbol.decode()}, each newer than the one before")


async def trade(connection: Client) -> None:
    orders, for_orders = connection.channel("sender")
    fills, for_fills = connection.channel()
    await connection.entrypoint.send(b"trade", attachments=[for_orders, for_fills])
    for number in range(100):
        await orders.send(b"%d" % number)
    await orders.finish()  # the market has all of them now
    filled = [message.payload async for message in fills]
    print("trader: 100 orders filled, in order:", filled == [b"filled %d" % number for number in range(100)])


async def main() -> None:
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(tcp.serve, serve)
        nursery.start_soon(publish)
        host, _, port = address.rpartition(":")
        async with tcp.connect(host, int(port)) as link, aqueduct.connection(link) as connection:
            async with trio.open_nursery() as work:
                for symbol in (b"TEA", b"TIN"):
                    work.start_soon(watch, connection, symbol)
                work.start_soon(trade, connection)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
