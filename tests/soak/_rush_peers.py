"""Echo servers and clients without muxkit, for `rush`: raw Trio over TCP and TLS, and the `websockets` library.

    python -m tests.soak._rush_peers serve|rush trio|trio+tls|ws|wss ...

`serve` prints its port and runs until its standard input ends. `rush` connects a number of clients at the same moment,
has each of them echo one message, keeps all connections until the last client has its answer, and prints how many
failed and how long it took.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

MESSAGE = b"echo"
WITHIN = 60.0  # seconds for one client


def client_context(ca: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca)


def server_context(chain: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain)
    return context


def report(failures: list[str], count: int, began: float) -> None:
    print(
        f"{count - len(failures)} {time.monotonic() - began:.3f} {max(set(failures), key=failures.count, default='')}"
    )


# --- raw Trio


def serve_trio(chain: str | None) -> None:
    import trio

    async def echo(stream: trio.abc.Stream) -> None:
        with suppress(trio.BrokenResourceError):
            async for data in stream:
                await stream.send_all(data)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            if chain is None:
                listeners = await nursery.start(trio.serve_tcp, echo, 0)
                port = listeners[0].socket.getsockname()[1]
            else:
                listeners = await nursery.start(trio.serve_ssl_over_tcp, echo, 0, server_context(chain))
                port = listeners[0].transport_listener.socket.getsockname()[1]
            print(port, flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)
            nursery.cancel_scope.cancel()

    trio.run(main)


def rush_trio(port: int, count: int, ca: str | None) -> None:
    import trio

    failures: list[str] = []

    async def main() -> None:
        all_done, waiting = trio.Event(), count
        context = None if ca is None else client_context(ca)

        async def visit() -> None:
            nonlocal waiting
            stream: trio.abc.Stream | None = None
            try:
                with trio.fail_after(WITHIN):
                    if context is None:
                        stream = await trio.open_tcp_stream("127.0.0.1", port)
                    else:
                        stream = await trio.open_ssl_over_tcp_stream("127.0.0.1", port, ssl_context=context)
                    await stream.send_all(MESSAGE)
                    assert await stream.receive_some() == MESSAGE
            except Exception as error:
                failures.append(repr(error))
            waiting -= 1
            if not waiting:
                all_done.set()
            await all_done.wait()
            if stream is not None:
                await trio.aclose_forcefully(stream)

        async with trio.open_nursery() as nursery:
            began = time.monotonic()
            for _ in range(count):
                nursery.start_soon(visit)
            await all_done.wait()
            report(failures, count, began)

    trio.run(main)


# --- the `websockets` library


def serve_websockets(chain: str | None) -> None:
    library: Any = import_module("websockets")  # which need not be installed for the checks
    serve = import_module("websockets.asyncio.server").serve

    async def echo(connection: Any) -> None:  # noqa: ANN401 - see `library`
        with suppress(library.exceptions.ConnectionClosed):
            async for message in connection:
                await connection.send(message)

    async def main() -> None:
        context = None if chain is None else server_context(chain)
        async with serve(echo, "127.0.0.1", 0, ssl=context) as server:
            print(next(iter(server.sockets)).getsockname()[1], flush=True)
            await asyncio.to_thread(sys.stdin.read)

    asyncio.run(main())


def rush_websockets(port: int, count: int, ca: str | None) -> None:
    connect = import_module("websockets.asyncio.client").connect
    failures: list[str] = []

    async def main() -> None:
        all_done, waiting = asyncio.Event(), count
        context = None if ca is None else client_context(ca)
        url = f"{'ws' if ca is None else 'wss'}://127.0.0.1:{port}"

        async def visit() -> None:
            nonlocal waiting
            try:
                async with asyncio.timeout(WITHIN):
                    connection = await connect(url, ssl=context, open_timeout=WITHIN)
                    await connection.send(MESSAGE)
                    assert await connection.recv() == MESSAGE
            except Exception as error:
                failures.append(repr(error))
            waiting -= 1
            if not waiting:
                all_done.set()

        began = time.monotonic()
        tasks = [asyncio.create_task(visit()) for _ in range(count)]
        await all_done.wait()
        report(failures, count, began)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    # Closing all connections in order is not part of the measurement.


SERVERS: dict[str, Callable[[str | None], None]] = {"trio": serve_trio, "ws": serve_websockets}
CLIENTS: dict[str, Callable[[int, int, str | None], None]] = {"trio": rush_trio, "ws": rush_websockets}


def main(arguments: list[str]) -> None:
    what, kind, *rest = arguments
    plain = {"trio+tls": "trio", "wss": "ws"}.get(kind)
    if what == "serve":
        SERVERS[plain or kind](rest[0] if plain else None)
    else:
        CLIENTS[plain or kind](int(rest[0]), int(rest[1]), rest[2] if plain else None)


if __name__ == "__main__":
    main(sys.argv[1:])
