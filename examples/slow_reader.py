"""Two channels of one connection, one of them read slowly: only its own sender waits."""

import trio

import muxkit

WINDOW = 64 * 1024  # bytes that a channel may have under way; small, so that it shows
MESSAGE = bytes(4 * 1024)
COUNT = 2_000  # messages on each channel

accepted: dict[str, int] = {"fast": 0, "slow": 0}


async def pour(channel: muxkit.Channel) -> None:
    """Send as fast as the channel takes it."""
    name = (await channel.receive()).decode()
    for _ in range(COUNT):
        await channel.send(MESSAGE)
        accepted[name] += 1
    await channel.finish()


async def main() -> None:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, muxkit.each_channel(pour), "bpmux+tcp://127.0.0.1:0")
        async with (
            muxkit.connect(served.url, limits=muxkit.Limits(channel_bytes=WINDOW)) as session,
            session.open() as fast,
            session.open() as slow,
        ):
            await slow.send(b"slow")
            await fast.send(b"fast")

            read = 0
            async for _ in fast:
                read += 1
            print(f"fast: {read} messages read, while slow was not read at all")

            waiting = accepted["slow"] * len(MESSAGE)
            print(f"slow: its sender waits, with {waiting:,} bytes under way and a window of {WINDOW:,}")
            ping = await session.ping()
            print(f"ping: answered beside it {'at once' if ping < 0.5 else 'late'}")

            read = 0
            async for _ in slow:
                read += 1
            print(f"slow: {read} messages read in the end, none was lost")
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
