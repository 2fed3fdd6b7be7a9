"""Static files of a folder over HTTP, for pages that talk to a muxkit server on the same port.

A WebSocket server with `Pages` reads the first request of each connection. An upgrade request becomes a WebSocket as
usual. Any other request is answered here, and the connection is closed afterwards. This is meant for the few files of
a page. For a larger site, use a web server and put the WebSocket behind it.
"""

from __future__ import annotations

import mimetypes
import os
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import unquote, urlsplit

import attrs
import h11
import trio

from ._files import MODULE, TYPES

PIECE: Final = 256 * 1024  # bytes of a file that are in memory simultaneously
HEAD_MAX: Final = 16_384  # bytes of a request's head
CLIENT: Final = {"muxkit.js": MODULE, "muxkit.d.ts": TYPES}
# The machine's registry may have other types for these, and browsers refuse modules of another type.
TYPES_OF: Final = {".js": "text/javascript; charset=utf-8", ".mjs": "text/javascript; charset=utf-8"}

Headers = list[tuple[str, str]]


@attrs.frozen
class Pages:
    """The files that a server delivers: those of a folder, and the JavaScript client as `/muxkit.js`.

    Files whose names begin with a dot aren't delivered, and neither are links that lead out of the folder. A file in
    the folder takes precedence over the client's file of the same name.

    Raises:
        ValueError: if `folder` isn't a folder.
    """

    folder: Path = attrs.field(converter=Path)

    def __attrs_post_init__(self) -> None:
        if not self.folder.is_dir():
            raise ValueError(f"invalid folder of pages: expected a folder, got {str(self.folder)!r}")

    async def answer(self, stream: trio.abc.SendStream, request: PageRequest) -> None:
        """Answer a request for a page. The response says that the connection will be closed.

        Args:
            stream: where to send the response.
            request: the request, as `read_request` returned it.
        """
        if request.method not in ("GET", "HEAD"):
            await request.respond(stream, HTTPStatus.METHOD_NOT_ALLOWED, [("Allow", "GET, HEAD")])
            return
        found = await trio.to_thread.run_sync(self._open, request.target)
        if found is None:
            await request.respond(stream, HTTPStatus.NOT_FOUND)
            return
        file, name = found
        try:
            status = os.fstat(file.fileno())
            tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
            headers = [("ETag", tag), ("Cache-Control", "no-cache"), ("X-Content-Type-Options", "nosniff")]
            if request.header("if-none-match") == tag:
                await request.respond(stream, HTTPStatus.NOT_MODIFIED, headers, None)
                return
            headers += [("Content-Type", _type_of(name)), ("Content-Length", str(status.st_size))]
            await request.respond(stream, HTTPStatus.OK, headers, file)
        finally:
            file.close()

    def _open(self, target: str) -> tuple[BinaryIO, str] | None:
        """Open the requested file. Return None if there is no such file, or if it must not be delivered."""
        parts = [part for part in unquote(urlsplit(target).path, errors="replace").split("/") if part]
        if any(part.startswith(".") or "\\" in part or "\0" in part or ":" in part for part in parts):
            return None
        folder = self.folder.resolve()
        path = folder.joinpath(*parts)
        try:
            if path.is_dir():
                path = path / "index.html"
            if not path.is_file() and len(parts) == 1 and parts[0] in CLIENT:
                return CLIENT[parts[0]].open("rb"), parts[0]
            path = path.resolve(strict=True)
            return (path.open("rb"), path.name) if path.is_file() and path.is_relative_to(folder) else None
        except OSError:
            return None


def _type_of(name: str) -> str:
    known = TYPES_OF.get(Path(name).suffix.lower())
    guessed = known or mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"{guessed}; charset=utf-8" if guessed.startswith("text/") and "charset" not in guessed else guessed


class PageRequest:
    """The first HTTP request of a connection. Made by `read_request`."""

    def __init__(self, parser: h11.Connection, request: h11.Request, head: bytes) -> None:
        self._parser = parser
        self.head: bytes = head
        """All bytes that were read, including any after the head."""
        self.method: str = request.method.decode("ascii")
        self.target: str = request.target.decode("latin-1")
        self._headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers]

    def header(self, name: str) -> str:
        """Return the first header with this name, which must be in lower case. Empty if there is none."""
        return next((value for each, value in self._headers if each == name), "")

    @property
    def is_upgrade(self) -> bool:
        """True if the request opens a WebSocket."""
        return "websocket" in self.header("upgrade").lower()

    async def respond(
        self,
        stream: trio.abc.SendStream,
        status: HTTPStatus,
        headers: Headers = [],  # noqa: B006 - it is read only
        body: BinaryIO | str | None = "",
    ) -> None:
        """Send a response.

        Args:
            stream: where to send the response.
            status: the status.
            headers: headers in addition to those of the body.
            body: a file, a text, or None for a response without a body. An empty text stands for that of the status.
        """
        text = f"{body or status.phrase}\n".encode() if isinstance(body, str) else b""
        if text:
            headers = [*headers, ("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))]
        response = h11.Response(status_code=status, headers=[*headers, ("Connection", "close")], reason=status.phrase)
        await self._send(stream, response)
        if self.method != "HEAD":
            if text:
                await self._send(stream, h11.Data(data=text))
            elif body is not None and not isinstance(body, str):
                while piece := await trio.to_thread.run_sync(body.read, PIECE):
                    await self._send(stream, h11.Data(data=piece))
        await self._send(stream, h11.EndOfMessage())

    async def _send(self, stream: trio.abc.SendStream, event: h11.Event) -> None:
        data = self._parser.send(event)
        if data:
            await stream.send_all(data)


async def read_request(stream: trio.abc.ReceiveStream) -> PageRequest | None:
    """Read the head of the first request. Return None if the peer closes, or if it sends something other than HTTP."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MAX)
    head = b""
    while True:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError:
            return None
        if isinstance(event, h11.Request):
            return PageRequest(parser, event, head)
        data = bytes(await stream.receive_some(HEAD_MAX))
        if not data:
            return None
        head += data
        parser.receive_data(data)
