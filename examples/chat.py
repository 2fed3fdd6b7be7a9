"""A chat with rooms over TLS: a token says who speaks, the name of a channel is its room.

`python examples/chat.py` runs a server and three people; one is cut off in the middle, and no error is logged. A slow
reader misses lines and delays no other person. It needs `pip install trustme`, which makes the certificate.
"""

import secrets
from collections import defaultdict
from contextlib import suppress

import trio
import trustme

import muxkit

WAITING = 100  # lines that the server keeps for a slow reader
TOKENS = {name: secrets.token_urlsafe() for name in ("ann", "bob", "cleo")}
rooms: defaultdict[str, dict[muxkit.Channel, trio.MemorySendChannel[str]]] = defaultdict(dict)


async def visit(channel: muxkit.Channel) -> None:
    room, name = rooms[channel.name], channel.session.info.user
    room[channel], waiting = trio.open_memory_channel[str](WAITING)
    try:
        tell(channel, f"* here: {', '.join(sorted(str(each.session.info.user) for each in room))}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_on, waiting, channel)
            async for text in channel:
                tell(channel, f"{name}: {text.decode()}")
            nursery.cancel_scope.cancel()
    finally:
        del room[channel]
        tell(channel, f"* gone: {name}")


def tell(channel: muxkit.Channel, line: str) -> None:
    for lines in rooms[channel.name].values():
        with suppress(trio.WouldBlock):  # this person does not read; the others must not wait
            lines.send_nowait(line)


async def pass_on(waiting: trio.MemoryReceiveChannel[str], channel: muxkit.Channel) -> None:
    async for line in waiting:
        await channel.send(line.encode())


async def read(name: str, channel: muxkit.Channel, *, until: str) -> None:
    async for message in channel:
        print(f"{name:>4} in #{channel.name:<6}  {message.decode()}")
        if message.decode() == until:
            return


async def main() -> None:
    authority = trustme.CA()
    trust = muxkit.TLS(ca=authority.cert_pem.bytes())
    with authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.tempfile() as certificate:
        tls = muxkit.TLS(cert=certificate)
        async with (
            muxkit.open_server(visit, "bpmux+tls://127.0.0.1:0", tls=tls, authorize=muxkit.tokens(TOKENS)) as server,
            muxkit.connect(server.url, tls=trust, token=TOKENS["ann"]) as ann,
            muxkit.connect(server.url, tls=trust, token=TOKENS["bob"]) as bob,
        ):
            trains, tea, bobs_tea = await ann.open("trains"), await ann.open("tea"), await bob.open("tea")
            await trains.send(b"hello?")
            with trio.CancelScope() as online:
                async with muxkit.connect(server.url, tls=trust, token=TOKENS["cleo"]) as cleo:
                    channel = await cleo.open("tea")
                    await read("cleo", channel, until="* here: ann, bob, cleo")
                    await channel.send(b"hello")
                    await read("cleo", channel, until="cleo: hello")
                    online.cancel()  # for the server as if the network had gone
            await read("bob", bobs_tea, until="* gone: cleo")
            await read("ann", tea, until="* gone: cleo")
            await read("ann", trains, until="ann: hello?")


if __name__ == "__main__":
    trio.run(main)
