"""The programs at both ends of the namespaces of `netns.sh`: an echo, and one who tries the path and tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

import trio

from muxkit_adapters import dtls, udp
from muxkit_adapters.udp import PacketTooLarge, UdpLink

HOST, PORT, SECURE_PORT = "10.2.0.2", 7000, 7001
PATIENCE = 30.0  # s; reached only when nothing gets through
AGAIN = 0.25  # s, after which a small packet is sent once more


async def echo(link: trio.abc.Channel[bytes]) -> None:
    async for packet in link:
        await link.send(packet)


async def there(certificate: str) -> None:
    async with trio.open_nursery() as nursery:
        context = dtls.server_context(certificate)
        await nursery.start(_serve_plain)
        await nursery.start(lambda task_status: _serve_secure(context, task_status))
        print("ready", flush=True)


async def _serve_plain(task_status: trio.TaskStatus[list[str]]) -> None:
    await udp.serve(echo, PORT, host=HOST, insecure=True, largest=1400, task_status=task_status)


async def _serve_secure(context: dtls.Context, task_status: trio.TaskStatus[list[str]]) -> None:
    await dtls.serve(echo, SECURE_PORT, host=HOST, ssl_context=context, task_status=task_status)


async def here(ca: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    async with udp.connect(HOST, PORT, insecure=True, largest=1400) as link:
        seen["echo"] = await comes_back(link, 100)
        seen["before"] = [link.packet_limit, link.path_mtu]
        seen["large"] = await comes_back(link, 1400)
        with suppress(PacketTooLarge):
            await link.send(bytes(1400))
        seen["after"] = [link.packet_limit, link.path_mtu]
        try:
            await link.send(bytes(1400))
        except PacketTooLarge as error:
            seen["error"] = [error.size, error.limit]
        if link.packet_limit < 1400:
            seen["what fits"] = await comes_back(link, link.packet_limit)
        seen["burst"] = await burst(link)
    async with udp.connect(HOST, PORT, insecure=True) as link:
        seen["by default"] = await comes_back(link, link.packet_limit)
    async with dtls.connect(HOST, SECURE_PORT, ssl_context=dtls.client_context(ca=ca)) as secure:
        seen["by default, encrypted"] = await comes_back(secure, secure.packet_limit)
    return seen


async def comes_back(link: trio.abc.Channel[bytes], size: int) -> bool:
    """Whether one of several packets of that size made it there and back; a small one that follows each tells."""
    with suppress(PacketTooLarge), trio.move_on_after(PATIENCE):
        for number in range(6):
            await link.send(bytes(size))
            if size in [len(packet) for packet in await until_back(link, b"after %d" % number)]:
                return True
    return False


async def until_back(link: trio.abc.Channel[bytes], last: bytes) -> list[bytes]:
    """What comes before this small packet is back. Nothing overtakes on these paths, however long an end sleeps."""
    packets: list[bytes] = []
    while True:
        await link.send(last)
        with trio.move_on_after(AGAIN):
            while (packet := await link.receive()) != last:
                packets.append(packet)
            return packets


async def burst(link: UdpLink) -> list[int]:
    """The numbers of those of a burst of 200 packets that came back, in the order in which they came."""
    left = [b"%1000d" % number for number in range(200)]
    while left:
        left = left[link.send_nowait(left) :]
    with trio.move_on_after(PATIENCE):
        # What is shorter answers something earlier.
        return [int(packet) for packet in await until_back(link, b"end of the burst") if len(packet) == 1000]
    return []


def main() -> None:
    role, path = sys.argv[1], sys.argv[2]
    if role == "there":
        trio.run(there, sys.argv[3])
        return
    command = [*os.environ["THERE"].split(), sys.executable, __file__, "there", path, sys.argv[3]]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        if other.stdout.readline() != "ready\n":
            sys.exit("the other end did not start")
        print(json.dumps(trio.run(here, path)))
    finally:
        other.kill()
        other.wait()


if __name__ == "__main__":
    main()
