"""TLS streams, version 1.2 or later, with certificates verified by default."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final

import trio

from muxkit import TLS, Identity, Limits
from muxkit.runtime import Reason, close_at_once, protect_package, protected_manager

from ._addresses import CERTIFICATE_NEEDED, Transport, join_host_port, one_of, one_place, several_places
from ._errors import HandshakeFailed
from ._identity import of_certificate
from ._listen import serve_handshakes
from ._sockets import SocketStream
from .tcp import CONNECT_TIMEOUT, UNSENT, Hosts, dial, each_host, listen

__all__ = ["HandshakeFailed", "TLSStream", "connect", "serve", "transport"]

CLOSE_TIMEOUT = 5.0  # s, for close_notify to leave when the peer does not read
ALERT_TIMEOUT = 1.0  # s, for a peer to read why it was refused
ALERT = re.compile(r"(?:SSLV3|TLSV1|TLSV13)_ALERT_(\w+)")  # as OpenSSL names what it received
CLIENT_CERTIFICATE = "If the server wants a client certificate: tls=muxkit.TLS(cert=…, key=…)"
FOREIGN = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"}
NO_TLS = "; what the peer sends is not TLS: is this a plaintext port?"
HANDSHAKE_TIMEOUT = 10.0  # s, on the connecting side; a listener has Limits.handshake


class TLSStream(trio.abc.Stream):
    """An encrypted stream; its end is clean only after the peer's close_notify."""

    def __init__(
        self, stream: trio.SSLStream[SocketStream], peer: str, *, close_timeout: float, shows_nothing: bool = False
    ) -> None:
        self._tls = stream
        self.peer = peer
        """The other end, for people: `tls example.org:7000`."""
        self._close_timeout = close_timeout
        self._closed = False
        self._told: Reason | None = None
        self._shows_nothing = shows_nothing
        self._identity: Identity | None = None

    @property
    def alpn(self) -> str | None:
        """The protocol that both sides agreed on, if ALPN was asked for."""
        chosen: str | None = self._tls.selected_alpn_protocol()
        return chosen

    @property
    def local(self) -> str:
        """This end, in the same form."""
        return self._tls.transport_stream.local

    @property
    def identity(self) -> Identity | None:
        """The peer by its certificate, if it was verified; None if the peer showed none, or was not asked."""
        if self._identity is None and self._tls.context.verify_mode is not ssl.CERT_NONE:
            proved: bytes | None = self._tls.getpeercert(binary_form=True)
            self._identity = None if proved is None else of_certificate(proved, self._tls.getpeercert())
        return self._identity

    @property
    def hint_if_silent(self) -> str | None:
        """What to try if the connection ends before a byte came: a client hears only then that it was refused."""
        return CLIENT_CERTIFICATE if self._shows_nothing and self._tls.version() == "TLSv1.3" else None

    @property
    def peer_reason(self) -> Reason | None:
        """What the peer says in an alert with which it ended the connection."""
        return self._told

    def __repr__(self) -> str:
        return f"<TLSStream {self.peer} {self._tls.version()}{', closed' if self._closed else ''}>"

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        try:
            return await self._tls.receive_some(max_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._ended(error) from error.__cause__

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self._tls.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._ended(error) from error.__cause__

    async def wait_send_all_might_not_block(self) -> None:
        try:
            await self._tls.wait_send_all_might_not_block()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._ended(error) from error.__cause__

    async def aclose(self) -> None:
        """Send close_notify and close; a peer that does not read delays it by the close timeout."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        with trio.move_on_after(self._close_timeout):
            await self._tls.aclose()

    def _ended(self, error: Exception) -> Exception:
        if self._closed:
            return trio.ClosedResourceError("this TLS stream was closed on our side")
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError):
            alert = alert_of(cause)
            self._told = self._told or (None if alert is None else Reason(f"TLS alert: {alert}"))
            return trio.BrokenResourceError(f"{self.peer}: {reason_of(cause)}")
        return trio.BrokenResourceError(str(error) or f"{self.peer}: a cancelled call left the stream unusable")


@protected_manager
async def connect(
    host: Hosts,
    port: int | None = None,
    *,
    tls: TLS | None = None,
    ssl_context: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    alpn: Sequence[str] = (),
    connect_timeout: float = CONNECT_TIMEOUT,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    close_timeout: float = CLOSE_TIMEOUT,
    unsent: int = UNSENT,
    insecure: bool = False,
) -> AsyncIterator[TLSStream]:
    """Open a TLS connection to a peer whose certificate is valid for `server_hostname`, by default the host.

    `tls`, or a context of your own in its place, says whom to trust and what to show; without either the authorities of
    the system are trusted. With `alpn`, a peer that agrees to none of these protocols is refused. Raises
    `HandshakeFailed` with the reason when the peer cannot be trusted. `insecure=True` admits a context that
    does not verify.
    """
    context, verifies = client_context(tls, ssl_context, alpn=alpn, insecure=insecure)
    wire, (found, at) = await dial("tls", each_host(host, port), connect_timeout=connect_timeout, unsent=unsent)
    where = f"tls {join_host_port(found, at)}{'' if verifies else ' (not verified, insecure)'}"
    wrapped = trio.SSLStream(wire, context, server_hostname=server_hostname or found, https_compatible=False)
    shows_nothing = ssl_context is None if tls is None else tls.cert is None
    stream = TLSStream(wrapped, where, close_timeout=close_timeout, shows_nothing=shows_nothing)
    async with _trusted(stream, wrapped, handshake_timeout, alpn):
        yield stream


async def serve(
    handler: Callable[[TLSStream], Awaitable[None]],
    port: int = 0,
    *,
    tls: TLS | None = None,
    ssl_context: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    alpn: Sequence[str] = (),
    limits: Limits | None = None,
    close_timeout: float = CLOSE_TIMEOUT,
    unsent: int = UNSENT,
    listeners: Sequence[socket.socket] = (),
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(stream)` for each connection whose handshake succeeds, until cancelled.

    `tls`, or a context of your own in its place, has the certificate and its key.
    """
    limits = limits or Limits()
    accept = acceptor(tls, ssl_context, alpn=alpn, limits=limits, close_timeout=close_timeout)
    open_to, addresses = await listen("tls", host, port, unsent=unsent, listeners=listeners)
    await serve_handshakes(open_to, accept, handler, limits=limits, started=lambda: task_status.started(addresses))


transport: Final = Transport("tls", connect, serve, several_places, one_place, needed=("tls", "ssl_context"))


# What WebSocket over TLS shares


def client_context(
    tls: TLS | None, context: ssl.SSLContext | None, *, insecure: bool, alpn: Sequence[str] = ()
) -> tuple[ssl.SSLContext, bool]:
    """Return the context for a client's next connection, and whether it verifies the server."""
    one_of(tls=tls, ssl_context=context)
    if tls is not None:
        verifies = tls.verify and not insecure
        if tls.verify and insecure:
            raise ValueError("insecure=True and tls=TLS(verify=True) contradict each other: leave insecure= out")
        context = tls.client_context(alpn)
    else:
        verifies = not insecure
        context = context or ssl.create_default_context()
        if alpn:
            context.set_alpn_protocols(list(alpn))
    check_context(context, verifies=verifies)
    return context, verifies


def acceptor(
    tls: TLS | None,
    context: ssl.SSLContext | None,
    *,
    limits: Limits,
    alpn: Sequence[str] = (),
    close_timeout: float = CLOSE_TIMEOUT,
) -> Callable[[SocketStream], AbstractAsyncContextManager[TLSStream]]:
    """Return a function that does the server's handshake over one accepted socket."""
    one_of(tls=tls, ssl_context=context)

    def current() -> ssl.SSLContext:
        found = context if tls is None else tls.server_context(alpn)  # another one after a reload
        if found is None:
            raise ValueError(CERTIFICATE_NEEDED)
        check_context(found, verifies=False)
        return found

    current()
    if alpn and context is not None:
        context.set_alpn_protocols(list(alpn))

    def accept(wire: SocketStream) -> AbstractAsyncContextManager[TLSStream]:
        wrapped = trio.SSLStream(wire, current(), server_side=True, https_compatible=False)
        stream = TLSStream(wrapped, wire.peer, close_timeout=close_timeout)
        return _trusted(stream, wrapped, limits.handshake, alpn)

    return accept


@protected_manager
async def _trusted(
    stream: TLSStream, tls: trio.SSLStream[SocketStream], within: float, alpn: Sequence[str]
) -> AsyncIterator[TLSStream]:
    """Do the handshake when entered; send close_notify when left normally, and close at once when left by an error."""
    try:
        await _shake_hands(tls, stream.peer, within)
        if alpn and stream.alpn is None:
            raise HandshakeFailed(f"{stream.peer}: the peer agrees to none of the protocols {', '.join(alpn)} (ALPN)")
        yield stream
    except BaseException:
        await close_at_once(stream)
        raise
    await stream.aclose()


async def _shake_hands(tls: trio.SSLStream[SocketStream], peer: str, within: float) -> None:
    try:
        with trio.fail_after(within):
            await tls.do_handshake()
    except trio.TooSlowError:
        text = f"the TLS handshake was not over within {within:g} s (handshake_timeout=)"
        raise HandshakeFailed(f"{peer}: {text}") from None
    except trio.BrokenResourceError as error:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError) and not _is_cut_off(cause):
            await _send_alert(tls)
            raise HandshakeFailed(f"{peer}: {reason_of(cause)}") from cause
        hint = "" if tls.server_side else "; is this a plaintext port?"
        raise HandshakeFailed(f"{peer}: the peer hung up during the TLS handshake{hint}") from cause


async def _send_alert(tls: trio.SSLStream[SocketStream]) -> None:
    """Send the alert that says what is wrong, which Trio leaves in the buffer; then let the peer read it."""
    wire, alert = tls.transport_stream, tls._outgoing.read()
    with trio.move_on_after(ALERT_TIMEOUT), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        if alert:
            await wire.send_all(alert)
            await wire.send_eof()
            while await wire.receive_some():  # what is not read would reset the connection, and the alert be lost
                pass


def check_context(context: ssl.SSLContext, *, verifies: bool) -> None:
    """Raises ValueError for a context that would accept what this transport promises to refuse.

    Sets two options that some Pythons leave open: Debian's the oldest version, the first releases of 3.11 whether a
    connection that was cut counts as ended.
    """
    if context.minimum_version is ssl.TLSVersion.MINIMUM_SUPPORTED:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    if context.minimum_version not in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        raise ValueError(
            f"ssl_context admits {context.minimum_version.name}: set minimum_version to ssl.TLSVersion.TLSv1_2"
        )
    if verifies and (not context.check_hostname or context.verify_mode is not ssl.CERT_REQUIRED):
        raise ValueError(
            f"ssl_context does not verify the server (check_hostname={context.check_hostname}, "
            f"verify_mode={context.verify_mode.name}): "
            "use ssl.create_default_context(), or pass insecure=True"
        )


def reason_of(error: ssl.SSLError) -> str:
    """Say why TLS failed, without any data that was sent."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate was refused: {error.verify_message}"
    if _is_cut_off(error):
        return "cut off without close_notify, so data may be missing"
    alert = alert_of(error)
    if alert is not None:
        told = "give it one: tls=muxkit.TLS(cert=…, key=…)"
        return f"the peer refused the connection: {alert}{f'; {told}' if alert == 'certificate required' else ''}"
    reason = (error.reason or type(error).__name__).replace("_", " ").lower()
    return f"TLS failed: {reason}{NO_TLS if error.reason in FOREIGN else ''}"


def alert_of(error: ssl.SSLError) -> str | None:
    """Return the alert that the peer sent: `certificate required`; None if the error is another one."""
    found = ALERT.fullmatch(error.reason or "")
    return None if found is None else found[1].replace("_", " ").lower()


def _is_cut_off(error: ssl.SSLError) -> bool:
    return isinstance(error, ssl.SSLEOFError) or "UNEXPECTED_EOF" in (error.reason or "")


protect_package("muxkit_adapters")
