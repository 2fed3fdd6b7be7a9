"""The server process of the demo: it echoes, counts and verifies, and ends when its standard input does.

`python -m muxkit.cli.demo.server tcp` prints its URL on standard output.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import trio

import muxkit
from muxkit.cli.demo.events import (
    Order,
    Ready,
    Receipt,
    Totals,
    peak_memory,
    read_order,
    run_part,
    tell,
    until_released,
)
from muxkit.cli.demo.payloads import BULK_SIZES, ECHO_SIZES, Checked, Payloads


class Server:
    """The handlers of all channels, and their common counters."""

    def __init__(self) -> None:
        self.checked = Checked()
        self.messages_sent = 0
        self.bytes_sent = 0

    async def serve_channel(self, channel: muxkit.Channel) -> None:
        order = read_order(await channel.receive())
        receipt = await (self._echo(channel, order) if order.job == "echo" else self._take(channel, order))
        await channel.send(msgspec.json.encode(receipt))

    async def _echo(self, channel: muxkit.Channel, order: Order) -> Receipt:
        payloads, checked, where = Payloads(order.seed, ECHO_SIZES), self.checked, f"echo channel {order.channel}"
        number = size = 0
        async for message in channel:
            checked.check(where, number, message, payloads.message(number))
            await channel.send(message)
            number += 1
            size += len(message)
            self.messages_sent += 1
            self.bytes_sent += len(message)
        return Receipt(number, size)

    async def _take(self, channel: muxkit.Channel, order: Order) -> Receipt:
        payloads, checked = Payloads(order.seed, BULK_SIZES), self.checked
        number = size = 0
        with suppress(trio.EndOfChannel):
            while True:
                for message in await channel.receive_many():
                    checked.check("bulk channel", number, message, payloads.message(number))
                    number += 1
                    size += len(message)
        return Receipt(number, size)

    def totals(self) -> Totals:
        return Totals(
            messages_sent=self.messages_sent,
            bytes_sent=self.bytes_sent,
            messages_verified=self.checked.messages,
            bytes_verified=self.checked.bytes,
            problems=self.checked.problems,
            memory=peak_memory(),
        )


async def serve(transport: str) -> Totals:
    if transport != "unix":
        return await _serve(f"bpmux+{transport}://127.0.0.1:0")
    # This process owns the folder, so that it is removed however the parent ends.
    with tempfile.TemporaryDirectory(prefix="muxkit-") as folder:
        return await _serve(f"bpmux+unix://{Path(folder, 'demo')}")


async def _serve(url: str) -> Totals:
    server = Server()
    async with trio.open_nursery() as nursery:
        served: muxkit.Served = await nursery.start(muxkit.serve, muxkit.each_channel(server.serve_channel), url)
        tell(Ready(served.url))
        await until_released()
        nursery.cancel_scope.cancel()
    return server.totals()


if __name__ == "__main__":
    sys.exit(run_part(partial(serve, sys.argv[1])))
