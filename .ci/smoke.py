"""Try an installed muxkit: one echo over TCP, one in memory, and the files that the wheel must hold.

Run by .ci/run with the wheel's own interpreter, outside the source tree.
"""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import trio

import muxkit
import muxkit_adapters

PAYLOAD = b"hello" * 1000


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def round_trip(url: str) -> None:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, muxkit.each_channel(echo), url)
        async with muxkit.connect(served.url) as session, session.open() as channel:
            await channel.send(PAYLOAD)
            answer = await channel.receive()
        if answer != PAYLOAD:
            raise SystemExit(f"{served.url}: {len(answer)} other bytes came back for {len(PAYLOAD)}")
        print(f"echo over {served.url}: {len(answer)} bytes")
        nursery.cancel_scope.cancel()


async def main() -> None:
    with trio.fail_after(30):
        for url in ("bpmux+tcp://127.0.0.1:0", "bpmux+mem://smoke"):
            await round_trip(url)


def complaints() -> Iterator[str]:
    """What is wrong with the installed files."""
    for package in (muxkit, muxkit_adapters):
        folder = Path(next(iter(package.__path__)))
        if "site-packages" not in folder.parts:
            yield f"{package.__name__} was imported from {folder}, not from the wheel"
        if not (folder / "py.typed").exists():
            yield f"{package.__name__} lacks its py.typed"
    ours = ("muxkit/", "muxkit_adapters/", "muxkit_bench/", "muxkit_web/", "pyspark_muxkit/", "pytest_muxkit/")
    allowed = (*ours, "muxkit-", "../../../bin/muxkit", "../../Scripts/muxkit")
    for file in importlib.metadata.files("muxkit") or ():
        compiled = "__mypyc." in file.name  # what all compiled modules of a wheel share lies beside the packages
        if not compiled and not file.as_posix().startswith(allowed):
            yield f"the wheel holds {file}"


found = list(complaints())
if found:
    raise SystemExit("\n".join(found))
trio.run(main)
