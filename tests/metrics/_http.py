"""A small HTTP client for the endpoint, over TCP and Unix sockets."""

from __future__ import annotations

from typing import Any

import trio


async def stream_to(url: str) -> trio.SocketStream:
    """Connect to `http://host:port` or `unix:path`."""
    if url.startswith("unix:"):
        return await trio.open_unix_socket(url.removeprefix("unix:"))
    host, _, port = url.removeprefix("http://").rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


async def rest_of(stream: trio.abc.ReceiveStream) -> bytes:
    """Read to the end."""
    data = bytearray()
    while more := await stream.receive_some():
        data += more
    return bytes(data)


async def get(
    url: str, path: str, *, method: str = "GET", host: str = "127.0.0.1", **headers: str
) -> tuple[int, str, str]:
    """Return the status, the head and the body of the answer."""
    stream = await stream_to(url)
    async with stream:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
        await stream.send_all("\r\n".join((*lines, "", "")).encode())
        head, _, body = (await rest_of(stream)).decode().partition("\r\n\r\n")
    return int(head.split(" ")[1]), head, body


async def get_json(url: str, path: str) -> tuple[int, Any]:
    import json

    status, _, body = await get(url, path)
    return status, json.loads(body)
