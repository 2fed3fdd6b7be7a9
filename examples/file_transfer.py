"""A file over a Unix socket, with progress at the sender and a checksum at the end; far larger than the window."""

import hashlib
import os
import tempfile

import trio

import muxkit

SIZE = 24 * 1024 * 1024  # bytes; a channel's window is 1 MiB
PIECE = 64 * 1024  # bytes in one message


async def send_file(session: muxkit.Session, path: trio.Path) -> str:
    """Send a file; return its checksum once the other side has computed the same."""
    digest = hashlib.sha256()
    size, sent, shown = (await path.stat()).st_size, 0, 0
    async with session.open() as channel, await path.open("rb") as file:
        await channel.send(path.name.encode())
        while piece := await file.read(PIECE):
            await channel.send(piece)  # waits while the receiver is a window behind
            digest.update(piece)
            sent += len(piece)
            if sent * 4 // size > shown:
                shown = sent * 4 // size
                print(f"{sent / size:4.0%} of {size:,} bytes sent")
        await channel.finish()
        if await channel.receive() != digest.digest():
            raise RuntimeError(f"{path.name} arrived damaged")
    return digest.hexdigest()


async def receive_file(channel: muxkit.Channel, folder: trio.Path) -> None:
    """The first message is the file's name, the others are its bytes; the answer is its checksum."""
    name = (await channel.receive()).decode()
    digest = hashlib.sha256()
    async with await (folder / trio.Path(name).name).open("xb") as file:
        async for piece in channel:
            digest.update(piece)
            await file.write(piece)
    await channel.send(digest.digest())


async def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source, arrivals = trio.Path(scratch, "holiday.mp4"), trio.Path(scratch, "arrivals")
        await source.write_bytes(os.urandom(SIZE))
        await arrivals.mkdir()

        async def handle(channel: muxkit.Channel) -> None:
            await receive_file(channel, arrivals)

        async with trio.open_nursery() as nursery:
            url = f"bpmux+unix://{scratch}/files.sock"
            served = await nursery.start(muxkit.serve, muxkit.each_channel(handle), url)
            async with muxkit.connect(served.url) as session:
                checksum = await send_file(session, source)
            nursery.cancel_scope.cancel()
        assert await (arrivals / source.name).read_bytes() == await source.read_bytes()
        print(f"arrived whole, sha256 {checksum[:16]}…")


if __name__ == "__main__":
    trio.run(main)
