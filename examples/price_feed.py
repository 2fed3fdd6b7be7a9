"""A price feed: one publisher, quick subscribers that get everything, and a slow one that gets the latest price.

`python examples/price_feed.py` shows that the slow one costs the others nothing.
"""

import msgspec
import trio

import muxkit
import muxkit.topics

PRICES = 2000


class Price(msgspec.Struct):
    symbol: str
    cents: int


async def publish(feed: muxkit.Topic[Price]) -> None:
    for number in range(1, PRICES + 1):
        await feed.publish(Price("TEA", number))
    feed.close()


async def follow(url: str, name: str, pause: float, *, task_status: trio.TaskStatus[None]) -> None:
    on_lag: muxkit.topics.OnLag = "latest" if pause else "end"
    async with (
        muxkit.connect(url) as session,
        session.subscribe("prices", codec=muxkit.MessagePack(Price), on_lag=on_lag) as prices,
    ):
        task_status.started()
        count, last = 0, 0
        async for price in prices:
            count, last = count + 1, price.cents
            if pause:
                await trio.sleep(pause)
        print(f"{name}: the last price is {last}" + (f", after {count - 1} others" if not pause else ""))


async def main() -> None:
    feed = muxkit.Topic(muxkit.MessagePack(Price), keep=PRICES)
    async with muxkit.open_server(muxkit.by_name({"prices": feed}), "bpmux+tcp://127.0.0.1:0") as server:
        async with trio.open_nursery() as nursery:
            for name, pause in [("quick 1", 0.0), ("quick 2", 0.0), ("slow", 0.001)]:
                await nursery.start(follow, server.url, name, pause)
            nursery.start_soon(publish, feed)


if __name__ == "__main__":
    trio.run(main)
