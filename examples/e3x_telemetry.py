"""Telemetry over UDP that loses every tenth packet: samples may be lost and are never late, commands all arrive."""

import random
from functools import partial

import trio

import muxkit
from muxkit.protocols import e3x
from muxkit_adapters import udp

SAMPLES = 300
COMMANDS = [b"pause 5", b"pause 2", b"pause 1"]  # ms between two samples
dice = random.Random(8)


async def measure(session: muxkit.Session) -> None:
    """The probe: an unreliable channel for what it measures, and a reliable one for what it is told to do."""
    assert isinstance(session, e3x.Session)
    pause = 10.0

    async def obey() -> None:
        nonlocal pause
        async with session.open("control") as control:
            async for command in control:  # asking for the next one tells the station that this one is done
                pause = float(command.removeprefix(b"pause "))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(obey)
        async with session.open("samples", reliable=False) as samples:
            for number in range(SAMPLES):
                await samples.send(b"%d" % number)  # never waits
                await trio.sleep(pause / 1000)


async def watch(session: muxkit.Session) -> None:
    """The station: shows what is missing as it goes, and gives commands."""

    async def show(samples: e3x.Channel) -> None:
        came = last = 0
        async for sample in samples:
            came, last = came + 1, int(sample)
            if came % 50 == 0:
                print(f"station: sample {last} is here, {last + 1 - came} before it were lost")

    async def command(control: e3x.Channel) -> None:
        for order in COMMANDS:
            receipt = await control.post(order)
            await receipt.delivered()  # it was carried out, not just sent
            print(f"station: the probe has done {order.decode()!r}")
        await control.finish()

    async with trio.open_nursery() as nursery:
        async for channel in session:
            assert isinstance(channel, e3x.Channel)
            nursery.start_soon(show if channel.type == "samples" else command, channel)
    assert isinstance(session, e3x.Session)
    print(f"station: all {len(COMMANDS)} commands were done, {session.stats().resent} packets sent again")


async def lose_some(port: int, link: udp.UdpLink) -> None:
    """The network: every tenth packet is lost, in each direction."""

    async def forward(here: udp.UdpLink, there: udp.UdpLink) -> None:
        async for packet in here:
            if dice.random() >= 0.1:
                await there.send(packet)

    async with udp.connect("127.0.0.1", port) as onward, trio.open_nursery() as nursery:
        nursery.start_soon(forward, onward, link)
        await forward(link, onward)


async def main() -> None:
    async with trio.open_nursery() as nursery:
        served: muxkit.Server = await nursery.start(muxkit.serve, watch, "e3x+udp://127.0.0.1:0")
        port = int(served.url.rpartition(":")[2])
        (address,) = await nursery.start(partial(udp.serve, partial(lose_some, port)))
        async with muxkit.connect(f"e3x+udp://{address}", linger=30) as session:
            await measure(session)
        await served.shutdown(grace=10)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
