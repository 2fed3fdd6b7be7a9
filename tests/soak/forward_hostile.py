"""What others notice of clients of `muxkit forward` that attack it, and how much memory that takes.

A server with a token and a client of it run as processes, over a WebSocket. While each attack lasts, callers connect
through the client's listener, one message a connection, and all of them have to be served.

- strangers: so many connections to the server that say nothing, or half of an upgrade;
- socks: so many to the client's proxy that say nothing, or half of a SOCKS handshake;
- stalled: a client with the token has so many connections that send to it without end, and reads none of them;
- forbidden: it asks for what is not allowed, as fast as it can: addresses, names that lead to loopback, listeners.

    python -m tests.soak.forward_hostile [--half-open 10000] [--stalled 4000] [--asks 20000] [--calls 500]

Ends with 1 if a caller was not served, something forbidden was reached, or a process kept more than `MEMORY` bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import trio

import muxkit
from muxkit.forward.wire import Code, Connect, ForwardRefused, Listen, ask
from tests.soak.forward_cuts import Command, command
from tests.soak.forward_peers import allow_files, called, free_port, target

TOKEN = "a-token-of-everybody-in-here"
MEMORY = 512 * 1024 * 1024  # bytes of a process, at most
AT_ONCE = 200  # connections that an attack opens before it looks whether they were taken
CALLERS = 4
SAID_TO_SERVER = (b"", b"GET /forward HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n")
SAID_TO_PROXY = (b"", b"\x05", b"\x05\x01\x00\x05\x01\x00\x03")
FORBIDDEN = (
    *("127.0.0.1:22", "[::1]:22", "[::ffff:127.0.0.1]:22", "2130706433:22", "0x7f.1:22", "0177.0.0.1:22", "127.1:22"),
    *("localhost:22", "169.254.169.254:80", "[64:ff9b::7f00:1]:22", "0.0.0.0:22", "/run/../etc/passwd", "/run/x.sock"),
)
LISTENERS = ("0.0.0.0:0", "[::]:0", "127.0.0.1:1", "[::ffff:0.0.0.0]:0", "/run/forward-hostile", "localhost:22")
WANTED: tuple[Connect | Listen, ...] = (*map(Connect, FORBIDDEN), *map(Listen, LISTENERS))


@attrs.define
class Figures:
    """What the callers noticed, and the memory of server and client, for each attack."""

    p99: dict[str, float] = attrs.field(factory=dict)
    """Seconds."""
    wrong: dict[str, int] = attrs.field(factory=dict)
    """Callers that were not served."""
    server: dict[str, int] = attrs.field(factory=dict)
    """Bytes, the most until the end of this attack."""
    client: dict[str, int] = attrs.field(factory=dict)
    notes: dict[str, str] = attrs.field(factory=dict)
    reached: int = 0
    """Answers other than a refusal to what is forbidden."""

    @property
    def are_right(self) -> bool:
        memory = max([*self.server.values(), *self.client.values()])
        return not self.reached and not any(self.wrong.values()) and memory <= MEMORY

    def __str__(self) -> str:
        rows = [
            f"{name:<10}{self.p99[name] * 1e3:>10.1f}{self.wrong[name]:>8}"
            f"{self.server[name] >> 20:>12}{self.client[name] >> 20:>12}  {self.notes.get(name, '')}"
            for name in self.p99
        ]
        head = f"{'attack':<10}{'p99 ms':>10}{'wrong':>8}{'server MiB':>12}{'client MiB':>12}"
        return "\n".join([head, *rows, f"{self.reached} forbidden things reached"])


@attrs.frozen(kw_only=True)
class Sizes:
    """How much is done."""

    half_open: int = 10_000
    stalled: int = 4_000
    asks: int = 20_000
    calls: int = 500


@attrs.frozen
class Place:
    """The processes, and where they are."""

    server: Command
    client: Command
    url: str
    target: int
    local: int
    proxy: int


Attack = Callable[[AsyncExitStack], Awaitable[str]]


@asynccontextmanager
async def _half_open(port: int, count: int, said: tuple[bytes, ...]) -> AsyncIterator[int]:
    """Hold connections that say one thing each and no more; yield how many are open."""
    opened: list[trio.SocketStream] = []

    async def one(number: int) -> None:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            opened.append(stream)
            await stream.send_all(said[number % len(said)])
        except OSError:
            return
        except trio.BrokenResourceError:
            return  # it had to make room already

    for begin in range(0, count, AT_ONCE):
        async with trio.open_nursery() as nursery:
            for number in range(begin, min(begin + AT_ONCE, count)):
                nursery.start_soon(one, number)
    try:
        yield len(opened)
    finally:
        for each in opened:
            await trio.aclose_forcefully(each)


async def _strangers(place: Place, count: int, stack: AsyncExitStack) -> str:
    port = int(place.url.rpartition(":")[2].partition("/")[0])
    return f"{await stack.enter_async_context(_half_open(port, count, SAID_TO_SERVER)):,} connections"


async def _socks(place: Place, count: int, stack: AsyncExitStack) -> str:
    return f"{await stack.enter_async_context(_half_open(place.proxy, count, SAID_TO_PROXY)):,} connections"


async def _stalled(place: Place, count: int, stack: AsyncExitStack) -> str:
    """Ask for connections to the target, have it send on each without end, and read nothing."""
    session = await stack.enter_async_context(muxkit.connect(place.url, token=TOKEN))
    granted = 0
    for _ in range(count):
        try:
            channel, _done = await ask(session, Connect(f"127.0.0.1:{place.target}"))
        except ForwardRefused as refused:
            return f"{granted:,} connections, then: {refused.reason}"
        granted += 1
        await channel.send(b"g" + (1 << 40).to_bytes(8, "big"))
    return f"{granted:,} connections"


async def _forbidden(place: Place, count: int, figures: Figures, stack: AsyncExitStack) -> str:
    """Ask for what no rule allows, in the background, so often."""
    session = await stack.enter_async_context(muxkit.connect(place.url, token=TOKEN))
    asked = 0

    async def go_on() -> None:
        nonlocal asked
        while asked < count:
            asked += 1
            wanted = WANTED[asked % len(WANTED)]
            try:
                await ask(session, wanted)
            except ForwardRefused as refused:
                if refused.code in (Code.NOT_ALLOWED, Code.MALFORMED, Code.NOT_FOUND):
                    continue
            figures.reached += 1
            print(f"reached: {wanted}", flush=True)

    nursery = await stack.enter_async_context(trio.open_nursery())
    for _ in range(CALLERS):
        nursery.start_soon(go_on)
    return f"{count:,} asked"


async def _measure(name: str, place: Place, attack: Attack | None, sizes: Sizes, figures: Figures) -> None:
    """Let callers call while an attack lasts."""
    async with AsyncExitStack() as stack:
        if attack is not None:
            figures.notes[name] = await attack(stack)
        found = await trio.to_thread.run_sync(called, "calls", place.local, sizes.calls, CALLERS)
        figures.p99[name], figures.wrong[name] = found.get("p99", 0.0), int(found["wrong"])
    figures.server[name], figures.client[name] = place.server.resident(), place.client.resident()


async def withstand(sizes: Sizes) -> Figures:
    """Run all attacks, one after the other."""
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder, target() as port:
        tokens = Path(folder) / "tokens"
        tokens.write_text(TOKEN)
        url = f"bpmux+ws://127.0.0.1:{free_port()}/forward"
        serving = (url, "--serve", "--allow", str(port), "--allow-listen", "9", "--token-file", str(tokens))
        async with command(*serving) as server:
            await server.event("listening")
            async with command(url, "-L", f"0:{port}", "-D", "0", "--token-file", str(tokens)) as client:
                local, proxy = [
                    int((await client.event("listening", number))["address"].rpartition(":")[2]) for number in (1, 2)
                ]
                place = Place(server, client, url, port, local, proxy)
                attacks: dict[str, Attack | None] = {
                    "none": None,
                    "strangers": partial(_strangers, place, sizes.half_open),
                    "socks": partial(_socks, place, sizes.half_open),
                    "forbidden": partial(_forbidden, place, sizes.asks, figures),
                    "stalled": partial(_stalled, place, sizes.stalled),
                }
                for name, attack in attacks.items():
                    await _measure(name, place, attack, sizes, figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plain = Sizes()
    for field in attrs.fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=getattr(plain, field.name))
    allow_files()
    figures = trio.run(withstand, Sizes(**vars(parser.parse_args())))
    print(figures)
    sys.exit(0 if figures.are_right else 1)


if __name__ == "__main__":
    main()
