"""An upload over Relink that goes on after lost connections, and after its client was killed, where it was.

`python examples/file_transfer.py` uploads a file from a process that it kills when half of the file has arrived, and
then once more; `python examples/file_transfer.py URL FILE` is the upload.
"""

import os
import sys
import tempfile
from functools import partial

import trio

import muxkit

SIZE = 24 * 1024 * 1024  # bytes; a channel's window is 1 MiB
PIECE = 64 * 1024  # bytes in one message


async def upload(url: str, path: trio.Path) -> None:
    """Send what the server does not have yet, and show how much it has."""
    size = (await path.stat()).st_size
    async with muxkit.connect(url) as session, await path.open("rb") as file:
        channel = await session.open(path.name)
        arrived = await file.seek(int(await channel.receive()))
        print(f"begins at {arrived / size:.0%}", flush=True)

        async def send() -> None:
            while piece := await file.read(PIECE):
                await channel.send(piece)  # waits while the server is a window behind
            await channel.finish()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while arrived < size:
                before, arrived = arrived, int(await channel.receive())
                if before * 4 // size < arrived * 4 // size:
                    print(f"{arrived * 4 // size * 25}% of {size:,} bytes have arrived", flush=True)


async def main() -> None:
    half_is_there = trio.Event()
    with tempfile.TemporaryDirectory() as scratch:
        source, arrivals = trio.Path(scratch, "holiday.mp4"), trio.Path(scratch, "arrivals")
        await source.write_bytes(os.urandom(SIZE))
        await arrivals.mkdir()

        async def store(channel: muxkit.Channel) -> None:
            path = arrivals / trio.Path(channel.name).name
            await path.touch()
            # Not to append: what is still on its way from a killed client is the same bytes for the same places.
            async with await path.open("r+b", buffering=0) as file:
                await channel.send(str(await file.seek(0, os.SEEK_END)).encode())
                async for piece in channel:
                    await file.write(piece)
                    await channel.send(str(position := await file.tell()).encode())
                    if position * 2 > SIZE:
                        half_is_there.set()

        async with muxkit.open_server(store, "relink+tcp://127.0.0.1:0", linger=0.1) as server:
            command = [sys.executable, __file__, server.url, str(source)]
            async with trio.open_nursery() as nursery:
                client: trio.Process = await nursery.start(partial(trio.run_process, command, check=False))
                await half_is_there.wait()
                client.kill()
            await trio.run_process(command)
        print("arrived whole:", await source.read_bytes() == await (arrivals / source.name).read_bytes())


if __name__ == "__main__":
    trio.run(upload, sys.argv[1], trio.Path(sys.argv[2])) if sys.argv[1:] else trio.run(main)
