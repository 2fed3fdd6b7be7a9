"""A restream server of the proof: it feeds its sessions, and continues after a kill where its store stands."""

from __future__ import annotations

import argparse
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from muxkit.protocols import restream
from muxkit_bench.proof.data import message

if TYPE_CHECKING:
    from collections.abc import Sequence

KEEP: Final = 24 * 3600.0  # s that a session outlives its last connection
AT_ONCE: Final = 250  # messages


async def feed(store: Any, stream: str, count: int, pause: float) -> None:  # noqa: ANN401 - any kind of store
    """Append messages up to `count`, then finish the stream."""
    known = {status.uuid: status async for status in _sessions(store)}
    if stream not in known:
        await store.register(stream, {}, params={}, attached=False, keep=KEEP)
    head = known[stream].head if stream in known else 0
    while head < count:
        upto = min(count, head + AT_ONCE)
        await store.append_many(stream, [message(stream, number) for number in range(head + 1, upto + 1)])
        head = upto
        await trio.sleep(pause)
    await store.finish(stream)


async def _sessions(store: Any) -> Any:  # noqa: ANN401 - an iterator over what a store gives
    page = await store.sessions()
    while page:
        for status in page:
            yield status
        page = await store.sessions(page[-1].uuid)


async def serve(descriptor: int, store_at: str, streams: Sequence[str], count: int, pause: float) -> None:
    """Serve on a listening socket of the parent, so that the port is open between two servers."""
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor)))
    async with restream.open_store(store_at, keep=KEEP) as store, trio.open_nursery() as nursery:
        await nursery.start(
            partial(
                restream.serve, [listener], store, application=restream.Fed(), config=restream.ServerConfig(status=True)
            )
        )
        print("serving", flush=True)
        for stream in streams:
            nursery.start_soon(feed, store, stream, count, pause)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--descriptor", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True)
    parser.add_argument("streams", nargs="+")
    options = parser.parse_args()
    trio.run(serve, options.descriptor, options.store, options.streams, options.count, options.pause)


if __name__ == "__main__":
    main()
