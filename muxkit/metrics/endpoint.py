"""The HTTP endpoint for metrics, health and the list of sessions. It runs on Trio and needs no web server."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import attrs
import trio

from muxkit._limits import Limits
from muxkit._observer import Counted, Observer
from muxkit._plugins import TRANSPORTS, load
from muxkit.metrics.collecting import Metrics
from muxkit.metrics.listing import Listing, Serving
from muxkit.runtime import background, protect_package, protected_manager

HEAD_MOST: Final = 8 * 1024  # bytes of a request
HEAD_SECONDS: Final = 5.0  # for a client to send its request
ANSWER_SECONDS: Final = 10.0  # for a client to read the answer
READERS_MOST: Final = 32  # requests that are unfinished at the same time; more let the oldest go
LIMITS: Final = Limits(connections=64)

TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
LOCAL: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})

_log: Final = logging.getLogger("muxkit")


@attrs.frozen
class Answer:
    """The response to a request."""

    status: HTTPStatus
    body: bytes = b""
    kind: str = TEXT
    headers: tuple[str, ...] = ()


@attrs.frozen
class Request:
    """The relevant parts of a request's head."""

    method: str
    path: str
    host: str
    accept: str


class Endpoint:
    """A running endpoint."""

    def __init__(self, pages: dict[str, Callable[[Request], Answer]]) -> None:
        self._pages = pages
        self._readers: dict[trio.CancelScope, None] = {}  # oldest first
        self.urls: tuple[str, ...] = ()
        """Where it is: `http://127.0.0.1:9464`, or `unix:/run/muxkit.sock`."""

    @property
    def url(self) -> str:
        """The first of `urls`."""
        return self.urls[0]

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Answer one request, then close the connection."""
        try:
            head = await self._read_head(stream)
            if head is None:
                return
            request = parse(head)
            answer = request if isinstance(request, Answer) else self._answer(request)
            is_short = isinstance(request, Request) and request.method == "HEAD"
            with trio.move_on_after(ANSWER_SECONDS):
                await stream.send_all(encode(answer, with_body=not is_short))
                if isinstance(stream, trio.abc.HalfCloseableStream):
                    await stream.send_eof()
                while await stream.receive_some(HEAD_MOST):  # closing with unread bytes could cut off the answer
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async def _read_head(self, stream: trio.abc.Stream) -> bytes | None:
        """Return the head of a request, or enough to see that it is too long. Return None if it doesn't arrive."""
        data = bytearray()
        with self._reading():
            while b"\r\n\r\n" not in data and b"\n\n" not in data:
                more = await stream.receive_some(HEAD_MOST)
                if not more:
                    return None
                data += more
                if len(data) > HEAD_MOST:
                    break
            return bytes(data)
        return None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Limit the time of a request and the number of unfinished requests."""
        with trio.move_on_after(HEAD_SECONDS) as scope:
            while len(self._readers) >= READERS_MOST:
                oldest = next(iter(self._readers))
                del self._readers[oldest]
                oldest.cancel()
            self._readers[scope] = None
            try:
                yield
            finally:
                self._readers.pop(scope, None)

    def _answer(self, request: Request) -> Answer:
        page = self._pages.get(request.path)
        if page is None:
            known = ", ".join(self._pages)
            return Answer(HTTPStatus.NOT_FOUND, f"there is nothing here; there is {known}\n".encode())
        if request.method not in ("GET", "HEAD"):
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n", headers=("Allow: GET, HEAD",))
        try:
            return page(request)
        except Exception as error:
            # log: A page of the metrics endpoint raised an error, and its client received 500. The DEBUG line after it
            # has the traceback.
            _log.error("the page %s failed with %s", request.path, type(error).__name__)
            # log: The traceback and the text of the error in the line before. They may quote what a peer sent.
            _log.debug("in full", exc_info=error)
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"this page failed; the log says more\n")


def parse(head: bytes) -> Request | Answer:
    """Parse the head of a request. If it is invalid, return the response to it instead."""
    if len(head) > HEAD_MOST:
        return Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the request is too long\n")
    first, *lines = head.partition(b"\r\n\r\n")[0].partition(b"\n\n")[0].decode("latin-1").splitlines() or [""]
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return Answer(HTTPStatus.BAD_REQUEST, b"this is no HTTP/1 request\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(words[0], words[1].partition("?")[0], headers.get("host", ""), headers.get("accept", ""))


def encode(answer: Answer, *, with_body: bool = True) -> bytes:
    """Return the bytes of a response."""
    lines = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *answer.headers,
    )
    return "\r\n".join((*lines, "", "")).encode("ascii") + (answer.body if with_body else b"")


class _Pages:
    """The pages of the endpoint."""

    def __init__(self, server: Serving | None, metrics: Metrics | None) -> None:
        self._server = server
        self._metrics = metrics
        self._listing = Listing()

    def sessions(self) -> Sequence[Counted]:
        of_server: Callable[[], Sequence[Counted]] | None = getattr(self._server, "sessions", None)
        known = [] if of_server is None else [*of_server()]
        if self._metrics is not None:
            known += [each for each in self._metrics.sessions() if each not in known]
        return known

    def health(self, request: Request) -> Answer:
        is_draining = self._server is not None and self._server.is_draining
        status = HTTPStatus.SERVICE_UNAVAILABLE if is_draining else HTTPStatus.OK
        told = {"status": "draining" if is_draining else "serving", "sessions": len(self.sessions())}
        return Answer(status, _json(told), JSON)

    def list_sessions(self, request: Request) -> Answer:
        return Answer(HTTPStatus.OK, _json(self._listing.describe(self._server, self.sessions())), JSON)

    def list_sessions_locally(self, request: Request) -> Answer:
        # A page of a browser may have made its own name point to this machine.
        host = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
        if host not in LOCAL:
            return Answer(HTTPStatus.FORBIDDEN, b"ask for this by the address 127.0.0.1 or the name localhost\n")
        return self.list_sessions(request)


@protected_manager
async def endpoint(
    server: Serving | None, address: str, *, metrics: Metrics | None = None, insecure: bool = False
) -> AsyncGenerator[Endpoint, None]:
    """Serve /metrics, /healthz, /readyz and /sessions by HTTP at `address` while the block runs.

    /healthz and /readyz answer 200 while the server accepts sessions, and 503 once it drains. /sessions names peers and
    channels, so it exists only on a loopback address and on a Unix socket. Everything is plaintext, so another address
    needs `insecure=True`.

    Args:
        server: The server to show, or None.
        address: `127.0.0.1:9464` or `unix:/run/muxkit.sock`.
        metrics: The metrics to show. By default the observer of `server`; without both there is no /metrics.
        insecure: Allow addresses beyond loopback.

    Raises:
        ExtraNeeded: If there are metrics and prometheus-client isn't installed.
        OSError: If the address can't be used.
    """
    if metrics is None:
        metrics = _metrics_of(server)
    pages = _Pages(server, metrics)
    shown: dict[str, Callable[[Request], Answer]] = {"/healthz": pages.health, "/readyz": pages.health}
    if metrics is not None:
        from muxkit.metrics.prometheus import render

        shown["/metrics"] = partial(_show_metrics, metrics, render)
    kind, place = _place(address)
    if kind == "unix":
        shown["/sessions"] = pages.list_sessions
    elif _is_loopback(place):
        shown["/sessions"] = pages.list_sessions_locally
    options = {} if kind == "unix" else {"insecure": insecure}
    transport: Any = load(TRANSPORTS, kind)
    running = Endpoint(shown)
    async with background() as nursery:

        async def serve(task_status: trio.TaskStatus[list[str]]) -> None:
            await transport.serve(running.handle, place, limits=LIMITS, task_status=task_status, **options)

        addresses: list[str] = await nursery.start(serve)
        scheme = "unix:" if kind == "unix" else "http://"
        running.urls = tuple(f"{scheme}{each}" for each in addresses)
        yield running


def _show_metrics(metrics: Metrics, render: Callable[[Metrics, str], tuple[bytes, str]], request: Request) -> Answer:
    body, kind = render(metrics, request.accept)
    return Answer(HTTPStatus.OK, body, kind)


def _metrics_of(server: Serving | None) -> Metrics | None:
    observer: Observer | None = getattr(server, "observer", None)
    return observer if isinstance(observer, Metrics) else None


def _place(address: str) -> tuple[str, str]:
    """Return the transport of an address, and the address for it."""
    if address.startswith("unix:"):
        return "unix", address.removeprefix("unix:").removeprefix("//")
    if address.startswith("/"):
        return "unix", address
    place = address.removeprefix("http://").rstrip("/")
    if ":" not in place:
        raise ValueError(f"{address!r}: expected HOST:PORT, such as 127.0.0.1:9464, or unix:PATH")
    return "tcp", place


def _is_loopback(place: str) -> bool:
    host = place.rpartition(":")[0]
    return host in LOCAL or host.startswith("127.")


def _json(told: dict[str, Any]) -> bytes:
    return json.dumps(told, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


protect_package(__name__)
