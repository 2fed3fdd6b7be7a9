"""The programs at both ends of the namespaces of `tests/system/netns.sh`: one reads, one sends and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import trio

import muxkit
from muxkit.protocols import e3x

URL = "e3x+udp://10.2.0.2:7000"
MESSAGES = [b"%8d" % number * 1000 for number in range(100)]


async def there() -> None:
    async def answer(session: muxkit.Session) -> None:
        async for channel in session:
            right = [message async for message in channel] == MESSAGES
            await channel.send(b"right" if right else b"wrong")
            await channel.aclose()

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(muxkit.serve, answer, URL, insecure=True))
        print("ready", flush=True)


async def here() -> dict[str, object]:
    async with muxkit.connect(URL, insecure=True, linger=20.0) as session, session.open() as channel:
        assert isinstance(session, e3x.Session)
        began = trio.current_time()
        await channel.send_many(MESSAGES)
        await channel.finish()
        answer = await channel.receive()
        took = trio.current_time() - began
        stats = session.stats()
        return {
            "answer": answer.decode(),
            "rate": sum(map(len, MESSAGES)) / took,
            "lost": stats.lost,
            "packets": stats.packets_sent,
        }


def main() -> None:
    if sys.argv[1] == "there":
        trio.run(there)
        return
    other = subprocess.Popen(
        [*os.environ["THERE"].split(), sys.executable, "-W", "ignore", "-m", __spec__.name, "there"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        if other.stdout.readline() != "ready\n":
            sys.exit("the other end did not start")
        print(json.dumps(trio.run(here)))
    finally:
        other.kill()
        other.wait()


if __name__ == "__main__":
    main()
