"""TLS streams, version 1.2 or later. Certificates are verified by default.

`TLSStream` drives Python's `ssl` module without `trio.SSLStream`. It offers the methods that muxkit's pumps look for,
such as `receive_nowait` and `send_nowait`, and each of its reads and writes handles many records with one system call.
"""

from __future__ import annotations

import operator
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final

import trio

from muxkit import TLS, Identity, Limits
from muxkit.runtime import Reason, alert_of, close_at_once, current_place, protect_package, protected_manager

from ._addresses import CERTIFICATE_NEEDED, Transport, join_host_port, one_of, one_place, several_places
from ._errors import HandshakeFailed
from ._identity import of_certificate
from ._listen import serve_handshakes
from ._sockets import RECEIVE_SIZE, Buffers, OneAtATime, SocketStream, in_batches, rest_of
from .balancers import Balancers
from .tcp import CONNECT_TIMEOUT, UNSENT, Hosts, dial, each_host, listen

__all__ = ["HandshakeFailed", "TLSStream", "connect", "serve", "transport"]

CLOSE_TIMEOUT = 5.0  # s to send close_notify to a peer that doesn't read
RECORD_SIZE = 16_384  # bytes of plaintext in a record, at most
ALERT_TIMEOUT = 1.0  # s for the peer to read why it was refused
# s for a server to accept or reject a client's certificate. Servers do so immediately. The timeout only bounds the wait
# for servers that send no session ticket and let the client send first. It is short enough not to look like a hang.
VERDICT_TIMEOUT = 1.0
FOREIGN_PROTOCOL = "It may speak another protocol"
CLIENT_CERTIFICATE = "The server asked for a client certificate: tls=muxkit.TLS(cert=…, key=…)"
GIVE_ONE = "give it one: tls=muxkit.TLS(cert=…, key=…)"
APPLICATION_DATA = 23  # the type of every encrypted record of TLS 1.3 (RFC 8446, section 5.2)
FINISHED_OVERHEAD = 4 + 1 + 16  # bytes around the hash in a Finished record: header, inner content type, tag
FOREIGN = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"}
NO_TLS = "; what the peer sends is not TLS: is this a plaintext port?"
HANDSHAKE_TIMEOUT = 30.0  # s for clients; a server has Limits.handshake


class TLSStream(trio.abc.Stream):
    """An encrypted stream. Its end is clean only after the peer's close_notify.

    Each read decrypts all records that one call of the socket returned. Each write encrypts all of its data, in batches
    of up to `BATCH_SIZE` bytes, before it calls the socket.

    Cancelling `receive_some` loses no data. Cancelling `send_all` while it waits for the socket leaves a record
    incomplete, and all later sends raise `trio.BrokenResourceError`.
    """

    def __init__(
        self,
        wire: SocketStream,
        context: ssl.SSLContext,
        *,
        server_hostname: str | None = None,
        server_side: bool = False,
        peer: str = "",
        close_timeout: float,
        shows_nothing: bool = False,
    ) -> None:
        self._wire = wire
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self.peer: str = peer or wire.peer
        """The name of the other end, such as `tls example.org:7000`."""
        self._close_timeout = close_timeout
        self._closed = False
        self._failure: ssl.SSLError | None = None  # after an error, nothing more can be decrypted
        self._was_cut = False  # a send was cancelled inside a record, so the peer couldn't decrypt later records
        self._told: Reason | None = None
        self._shows_nothing = shows_nothing
        self._is_1_3 = False  # stored, because OpenSSL forgets the version when the connection ends
        self._is_judged = True  # False while a server that requested our certificate may still reject it
        self._early = b""  # decrypted while the stream waited for the server to accept the certificate
        self._identity: Identity | None = None
        self._sending = OneAtATime("sending on this TLS stream")
        self._receiving = OneAtATime("receiving from this TLS stream")
        self._may_hold_more = False  # the last receive may have left data to decrypt
        self._unsent: bytes | memoryview = b""  # encrypted; it goes out before the content of `_outgoing`
        self._owed = 0  # bytes at the start of the next write that are already encrypted
        self._is_reply_late = False  # the socket didn't accept all output that reading has produced
        self._replying: trio.CancelScope | None = None  # of a reader that waits to send this output
        self._sent: trio.Event | None = None  # set for a close that waits for a running send

    @property
    def alpn(self) -> str | None:
        """The protocol that both sides agreed on, or None if ALPN wasn't used."""
        return self._tls.selected_alpn_protocol()

    @property
    def local(self) -> str:
        """The name of this end, in the form of `peer`."""
        return self._wire.local

    @property
    def identity(self) -> Identity | None:
        """The identity in the peer's verified certificate. None if the peer presented none or wasn't asked for one."""
        if self._identity is None and self._tls.context.verify_mode is not ssl.CERT_NONE:
            proved = self._tls.getpeercert(binary_form=True)
            self._identity = None if proved is None else of_certificate(proved, self._tls.getpeercert() or {})
        return self._identity

    @property
    def may_be_refused_late(self) -> bool:
        """True if the server requested a certificate and hasn't accepted it within `VERDICT_TIMEOUT`.

        This happens only with a TLS 1.3 server that sends no session ticket and lets the client send first.
        """
        return not self._is_judged

    @property
    def hint_if_silent(self) -> str | None:
        """The advice for error texts if the connection ends before any byte arrived.

        With TLS 1.3, a client may learn only then that the server rejected its certificate.
        """
        if self._tls.server_side:
            return None
        certificate = CLIENT_CERTIFICATE if self._shows_nothing and not self._is_judged else ""
        if self._told:
            return certificate or None
        return f"{certificate}. {FOREIGN_PROTOCOL}, too" if certificate else FOREIGN_PROTOCOL

    @property
    def peer_reason(self) -> Reason | None:
        """The reason in the alert with which the peer ended the connection, or None."""
        return self._told

    def __repr__(self) -> str:
        return f"<TLSStream {self.peer} {self._tls.version()}{', closed' if self._closed else ''}>"

    # Receiving

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        size = RECEIVE_SIZE if max_bytes is None else operator.index(max_bytes)
        if size < 1:
            raise ValueError(f"max_bytes={size}: must be at least 1")
        self._receiving.begin()
        try:
            await self.wait_readable()
            while (data := self.receive_nowait(size)) is None:
                await self.wait_readable()
        finally:
            self._receiving.is_busy = False
        return data

    @property
    def may_answer_after_end(self) -> bool:
        """True if the peer may keep reading after its close_notify, which up to TLS 1.2 ends both directions."""
        return self._is_1_3

    async def wait_readable(self) -> None:
        """Sleep until there is something to receive, or an error. May return early."""
        if self._may_hold_more or self._failure is not None or self._closed:
            await trio.lowlevel.checkpoint()
            return
        if self._is_reply_late:
            await self._reply()
        await self._wire.wait_readable()

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        """Return data that has arrived, b"" at the end of the stream, or None if no record is complete."""
        if self._closed or self._failure is not None:
            raise self._ended() from self._failure
        if self._may_hold_more and (data := self._decrypted(max_bytes)) is not None:
            return data
        came = self._wire.receive_nowait(max(max_bytes, RECEIVE_SIZE))
        if came is None:
            return None
        if came:
            self._incoming.write(came)
        else:
            self._incoming.write_eof()
        return self._decrypted(max_bytes)

    def stop_waiting(self) -> None:
        """Make `wait_readable` return now."""
        self._wire.stop_waiting()

    def _decrypted(self, max_bytes: int) -> bytes | None:
        """Decrypt the available records. Return b"" after close_notify, and None if no record is complete."""
        read, incoming = self._tls.read, self._incoming
        pieces: list[bytes] = []
        left = max_bytes
        if self._early:
            pieces.append(self._early)  # one byte
            left -= 1
            self._early = b""
        self._may_hold_more = False
        try:
            while True:
                piece = read(min(left, RECORD_SIZE))
                if not piece:  # close_notify, which the next call will find again
                    self._may_hold_more = True
                    break
                pieces.append(piece)
                left -= len(piece)
                if not left:
                    self._may_hold_more = True
                    break
                if not incoming.pending:
                    break
        except ssl.SSLWantReadError:
            if not pieces:
                return None
        except ssl.SSLError as error:
            self._failure, alert = error, alert_of(error)
            self._told = self._told or (None if alert is None else Reason(f"TLS alert: {alert}"))
            if not pieces:
                raise self._ended() from error
        finally:
            if self._outgoing.pending:  # a response to the peer, such as to a KeyUpdate, or an alert
                self._push_beside()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _push_beside(self) -> None:
        """Send the output that reading has produced, unless a running send will send it."""
        if not self._sending.is_busy and not self._was_cut:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # the next send reports the error
                self._is_reply_late = not self._push() and not self._owed

    async def _reply(self) -> None:
        """Wait until the socket accepts the output that reading has produced, or until a sender sends it."""
        self._is_reply_late = False
        with trio.CancelScope() as self._replying:
            await self._wire.wait_writable()
        self._replying = None
        self._push_beside()

    # Sending

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._sending, memoryview(data).cast("B") as view:
            await self._send([view] if len(view) else [])

    async def send_buffers(self, buffers: Buffers) -> None:
        """Send several buffers, as `send_all` does. Their records go out together."""
        with self._sending:
            await self._send(buffers)

    def send_nowait(self, buffers: Buffers) -> int:
        """Send as much as the kernel accepts now, in order. Return the number of bytes, which may be 0.

        The result counts complete records only. The remaining data is already encrypted, so the next write must begin
        with it.
        """
        self._sending.check()
        self._check_sendable()
        if self._owed and not self._push():
            return 0
        total = sum(map(len, buffers))
        self._encrypt(buffers)
        if self._push():
            return total
        owed = min(total, len(self._unsent) + RECORD_SIZE)  # the first record may have been sent in part
        self._owed += owed
        return total - owed

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            if self._closed or self._was_cut or self._failure is not None:
                await trio.lowlevel.checkpoint()
                self._check_sendable()
            await self._wait_writable()

    async def _send(self, buffers: Buffers) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        try:
            self._check_sendable()
            for batch in in_batches(buffers):
                self._encrypt(batch)
                while not self._push():
                    waited = True
                    await self._wait_writable()
        except (trio.Cancelled, KeyboardInterrupt):
            self._was_cut = self._was_cut or waited
            raise
        finally:
            if self._sent is not None:
                self._sent.set()
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    def _encrypt(self, buffers: Buffers) -> None:
        """Encrypt buffers with one call of OpenSSL.

        Each call ends with a record, so one call for each buffer would put headers of a few bytes into records of their
        own. Such a record takes more processor time, on both ends, than joining 64 KiB: without this, a download
        through a forward over `tls` takes 18 % more.
        """
        if self._owed:
            done = min(self._owed, sum(map(len, buffers)))
            self._owed -= done
            buffers = rest_of([*buffers], done)
        data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        if len(data):
            self._tls.write(data)

    def _push(self) -> bool:
        """Pass encrypted data to the kernel. Return True if it accepted everything."""
        rest: bytes | memoryview = self._outgoing.read()
        if self._unsent:
            rest = b"".join((self._unsent, rest)) if rest else self._unsent
        if not rest:
            return True
        taken = self._wire.send_nowait([rest])
        if taken == len(rest):
            self._unsent = b""
            return True
        self._unsent = memoryview(rest)[taken:]
        return False

    async def _wait_writable(self) -> None:
        if self._replying is not None:
            self._replying.cancel()  # only one task may wait for the socket
        await self._wire.wait_writable()

    def _check_sendable(self) -> None:
        if self._closed or self._failure is not None:
            raise self._ended() from self._failure
        if self._was_cut:
            raise trio.BrokenResourceError(f"{self.peer}: a cancelled call left the stream unusable")

    # The handshake and the end

    async def _handshake(self) -> None:
        """Do the handshake. Raises `ssl.SSLError`, after which an alert for the peer may be left to send."""
        await trio.lowlevel.checkpoint()  # gives a foreign protocol whose server sends first the time to show itself
        is_done = False
        place = current_place() if self._tls.server_side else None
        if place is not None:
            place.progressed()  # the wait for the peer starts only now
        while not is_done:
            try:
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                pass
            flight = self._outgoing.read()
            if is_done and self._tls.version() == "TLSv1.3":
                if not self._tls.server_side:
                    self._is_judged = not self._holds_certificate(flight)
                elif self._tls.context.verify_mode is ssl.CERT_NONE:
                    # These are session tickets. A client that only sends would never read them, and its close would
                    # reset the connection. A client with a certificate waits for them, since they mean acceptance.
                    self._unsent, flight = flight, b""
            if flight:
                await self._wire.send_all(flight)
                if place is not None:
                    place.progressed()  # the peer has completed a flight
            if not is_done:
                came = await self._wire.receive_some()
                if came:
                    self._incoming.write(came)
                else:
                    self._incoming.write_eof()
        self._is_1_3 = self._tls.version() == "TLSv1.3"
        self._may_hold_more = bool(self._incoming.pending)

    def _holds_certificate(self, flight: bytes) -> bool:
        """Return True if a client's last flight answers a server's request for a certificate.

        The `ssl` module doesn't report whether the server sent a CertificateRequest. Without one, the encrypted part of
        the flight is a Finished message, whose size follows from the hash of the cipher suite. The answer to a request
        is a Certificate message before it, even if the client has no certificate (RFC 8446, section 4.4).
        """
        cipher = self._tls.cipher()
        digest = 48 if cipher is not None and cipher[0].endswith("SHA384") else 32
        encrypted = at = 0
        while at < len(flight):
            size = int.from_bytes(flight[at + 3 : at + 5], "big")
            encrypted += size if flight[at] == APPLICATION_DATA else 0
            at += 5 + size
        return encrypted > digest + FINISHED_OVERHEAD

    async def _verdict(self) -> None:
        """Wait until a server that requested a certificate accepts the client.

        Anything that arrives after the handshake means acceptance: a session ticket, or the first bytes of the
        protocol. Raises `trio.BrokenResourceError` if the server ends the connection instead.
        """
        with trio.move_on_after(VERDICT_TIMEOUT):
            while not self._is_judged:
                await self.wait_readable()
                came = self.receive_nowait(1)
                if came:
                    self._early, self._may_hold_more = came, True
                session = self._tls.session
                self._is_judged = bool(came) or (session is not None and session.has_ticket)
                if came == b"" and not self._is_judged:
                    raise trio.BrokenResourceError("close_notify")

    async def aclose(self) -> None:
        """Send close_notify and close. A peer that doesn't read delays this by at most the close timeout.

        If this is cancelled, the stream is closed without close_notify, so that the peer doesn't take the end for a
        clean one.
        """
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        try:
            with trio.move_on_after(self._close_timeout):
                await trio.lowlevel.checkpoint_if_cancelled()  # if cancelled, the peer mustn't see a clean end
                if self._sending.is_busy:
                    self._sent = trio.Event()
                    await self._sent.wait()
                if self._failure is None and not self._was_cut:
                    await self._say_goodbye()
        finally:
            await self._wire.aclose()

    async def part(self) -> None:
        """Send close_notify, then read until the peer has closed. The caller limits the time."""
        if self._closed or self._failure is not None or self._was_cut:
            return
        await self._say_goodbye()
        await self._wire.send_eof()
        while await self._wire.receive_some(RECEIVE_SIZE):
            pass

    async def _say_goodbye(self) -> None:
        with suppress(ssl.SSLError):  # raised unless the peer's close_notify has arrived, which we don't wait for
            self._tls.unwrap()
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while not self._push():
                await self._wait_writable()

    def _ended(self) -> Exception:
        if self._closed or self._failure is None:
            return trio.ClosedResourceError("this TLS stream was closed on our side")
        return trio.BrokenResourceError(f"{self.peer}: {reason_of(self._failure)}")


@protected_manager
async def connect(
    host: Hosts,
    port: int | None = None,
    *,
    tls: TLS | None = None,
    ssl_context: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    alpn: Sequence[str] = (),
    offers: Sequence[str] = (),
    connect_timeout: float = CONNECT_TIMEOUT,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    close_timeout: float = CLOSE_TIMEOUT,
    unsent: int = UNSENT,
    proxy: str | None = None,
    insecure: bool = False,
) -> AsyncIterator[TLSStream]:
    """Open a TLS connection to a peer whose certificate is valid for `server_hostname`.

    Leaving the block normally sends close_notify. Leaving it with an error closes the connection abruptly.

    A TLS 1.3 server that requests a client certificate sees it only after the client's handshake. In this case the call
    waits for the first data from the server, which takes one round trip. A server that sends no session ticket and lets
    the client send first may send nothing. Then the call returns after a second, and the next call that waits for the
    connection raises the error if the server rejects the certificate later.

    Args:
        host: a host, or a list of `(host, port)` to try in order.
        port: the port of a single host.
        tls: the certificates to trust and to present. By default the authorities of the system are trusted.
        ssl_context: a context to use instead of `tls`.
        server_hostname: the name that the certificate must have. By default the host.
        alpn: protocols to offer. A peer that agrees to none of them is refused.
        offers: protocols to offer that the peer doesn't have to know. A context of your own doesn't offer them.
        connect_timeout: seconds to connect, for each host.
        handshake_timeout: seconds for the handshake.
        close_timeout: seconds to send close_notify to a peer that doesn't read.
        unsent: bytes of unsent data that the kernel may hold.
        proxy: the URL of a proxy to connect through, or "environment". The proxy can't read the connection.
        insecure: allow a context that doesn't verify.

    Raises:
        HandshakeFailed: if one side rejects the other, or if the handshake takes too long. The error has the reason.
        OSError: if no host answers.
        ValueError: if the context doesn't verify the server and `insecure` isn't set.
    """
    opened = handshaken(
        host,
        port,
        tls=tls,
        ssl_context=ssl_context,
        server_hostname=server_hostname,
        alpn=alpn,
        offers=offers,
        connect_timeout=connect_timeout,
        handshake_timeout=handshake_timeout,
        close_timeout=close_timeout,
        unsent=unsent,
        proxy=proxy,
        insecure=insecure,
    )
    async with opened as stream:
        try:
            await stream._verdict()
        except trio.BrokenResourceError as error:
            raise _refusal(stream, error) from error
        yield stream


@protected_manager
async def handshaken(
    host: Hosts,
    port: int | None = None,
    *,
    tls: TLS | None = None,
    ssl_context: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    alpn: Sequence[str] = (),
    offers: Sequence[str] = (),
    connect_timeout: float = CONNECT_TIMEOUT,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    close_timeout: float = CLOSE_TIMEOUT,
    unsent: int = UNSENT,
    proxy: str | None = None,
    insecure: bool = False,
) -> AsyncIterator[TLSStream]:
    """Open a connection as `connect` does, but don't wait until the server has accepted the client's certificate.

    This is for a caller that sends a request and waits for the answer, which implies acceptance.
    """
    context, verifies = client_context(tls, ssl_context, alpn=alpn, offers=offers, insecure=insecure)
    wire, (found, at) = await dial(
        "tls", each_host(host, port), connect_timeout=connect_timeout, unsent=unsent, proxy=proxy
    )
    where = f"tls {join_host_port(found, at)}{'' if verifies else ' (not verified, insecure)'}"
    stream = TLSStream(
        wire,
        context,
        server_hostname=server_hostname or found,
        peer=where,
        close_timeout=close_timeout,
        shows_nothing=ssl_context is None if tls is None else tls.cert is None,
    )
    async with _trusted(stream, handshake_timeout, alpn):
        yield stream


async def serve(
    handler: Callable[[TLSStream], Awaitable[None]],
    port: int = 0,
    *,
    tls: TLS | None = None,
    ssl_context: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    alpn: Sequence[str] = (),
    offers: Sequence[str] = (),
    limits: Limits | None = None,
    close_timeout: float = CLOSE_TIMEOUT,
    unsent: int = UNSENT,
    balancers: Collection[str] = (),
    listeners: Sequence[socket.socket] = (),
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(stream)` for each connection whose handshake succeeds, until cancelled.

    Args:
        handler: gets each stream, which is closed afterwards.
        port: the port. 0 chooses a free one.
        tls: the server's certificate and key. After a reload, new connections use the new ones.
        ssl_context: a context to use instead of `tls`.
        host: the address to bind, or a host with several addresses. An empty host binds all addresses.
        alpn: protocols to accept. A client that offers none of them is refused.
        offers: protocols to accept that a client doesn't have to know. A context of your own has none of them.
        limits: how many connections and handshakes are allowed, and the time for a handshake.
        close_timeout: seconds to send close_notify to a peer that doesn't read.
        unsent: bytes of unsent data that the kernel may hold for each connection.
        balancers: addresses or networks of load balancers. A connection from one of them must begin with a header of
            the PROXY protocol, which names the real peer.
        listeners: sockets that were bound elsewhere, used instead of `host` and `port`.
        task_status: gets a list of the bound addresses.

    Raises:
        ValueError: if there is no certificate, or if the context allows versions before TLS 1.2.
        OSError: if an address can't be bound.
    """
    limits = limits or Limits()
    trusted = Balancers(balancers)
    accept = trusted.before(
        acceptor(tls, ssl_context, alpn=alpn, offers=offers, limits=limits, close_timeout=close_timeout)
    )
    open_to, addresses = await listen("tls", host, port, unsent=unsent, balancers=trusted, listeners=listeners)
    await serve_handshakes(open_to, accept, handler, limits=limits, started=lambda: task_status.started(addresses))


transport: Final = Transport("tls", connect, serve, several_places, one_place, needed=("tls", "ssl_context"))


# Shared with WebSocket over TLS


def client_context(
    tls: TLS | None,
    context: ssl.SSLContext | None,
    *,
    insecure: bool,
    alpn: Sequence[str] = (),
    offers: Sequence[str] = (),
) -> tuple[ssl.SSLContext, bool]:
    """Return the context for a client's next connection, and whether it verifies the server.

    Raises:
        ValueError: if the arguments contradict each other, or if the context doesn't verify without `insecure`.
    """
    one_of(tls=tls, ssl_context=context)
    if tls is not None:
        verifies = tls.verify and not insecure
        if tls.verify and insecure:
            raise ValueError("insecure=True and tls=TLS(verify=True) contradict each other: leave insecure= out")
        context = tls.client_context(alpn or offers)
    else:
        verifies = not insecure
        if context is None:
            context = ssl.create_default_context()
            alpn = alpn or offers
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
    offers: Sequence[str] = (),
    close_timeout: float = CLOSE_TIMEOUT,
) -> Callable[[SocketStream], AbstractAsyncContextManager[TLSStream]]:
    """Return a function that does the server's handshake on an accepted socket.

    Raises:
        ValueError: if there is no certificate, or if the context allows versions before TLS 1.2.
    """
    one_of(tls=tls, ssl_context=context)

    def current() -> ssl.SSLContext:
        found = context if tls is None else tls.server_context(alpn or offers)  # another one after a reload
        if found is None:
            raise ValueError(CERTIFICATE_NEEDED)
        check_context(found, verifies=False)
        return found

    current()
    if alpn and context is not None:
        context.set_alpn_protocols(list(alpn))

    def accept(wire: SocketStream) -> AbstractAsyncContextManager[TLSStream]:
        stream = TLSStream(wire, current(), server_side=True, close_timeout=close_timeout)
        return _trusted(stream, limits.handshake, alpn)

    return accept


@protected_manager
async def _trusted(stream: TLSStream, within: float, alpn: Sequence[str]) -> AsyncIterator[TLSStream]:
    """Do the handshake on entry. On a normal exit send close_notify, and on an error close abruptly."""
    try:
        await _shake_hands(stream, within)
        if alpn and stream.alpn is None:
            text = f"{stream.peer}: the peer agrees to none of the protocols {', '.join(alpn)} (ALPN)"
            raise HandshakeFailed(text, alert="no application protocol")
        yield stream
    except BaseException:
        await close_at_once(stream)
        raise
    await stream.aclose()


async def _shake_hands(stream: TLSStream, within: float) -> None:
    cause: Exception
    try:
        with trio.fail_after(within):
            await stream._handshake()
        return
    except trio.TooSlowError:
        text = f"the TLS handshake was not over within {within:g} s (handshake_timeout=)"
        raise HandshakeFailed(f"{stream.peer}: {text}") from None
    except ssl.SSLError as error:
        if not _is_cut_off(error):
            await _send_alert(stream)
            found = "a protocol without TLS" if error.reason in FOREIGN else None
            raise HandshakeFailed(f"{stream.peer}: {reason_of(error)}", alert=alert_of(error), found=found) from error
        cause = error
    except trio.BrokenResourceError as error:
        cause = error
    hint = "" if stream._tls.server_side else "; is this a plaintext port?"
    raise HandshakeFailed(f"{stream.peer}: the peer hung up during the TLS handshake{hint}") from cause


def _refusal(stream: TLSStream, error: trio.BrokenResourceError) -> HandshakeFailed:
    """Return the error for a server that ended the connection instead of accepting the client's certificate."""
    cause = error.__cause__
    alert = alert_of(cause) if isinstance(cause, ssl.SSLError) else None
    if isinstance(cause, ssl.SSLError) and alert is not None:
        return HandshakeFailed(f"{stream.peer}: {reason_of(cause)}", alert=alert)
    told = f"; {GIVE_ONE}" if stream._shows_nothing else ""
    return HandshakeFailed(f"{stream.peer}: the peer hung up after it had asked for a client certificate{told}")


async def _send_alert(stream: TLSStream) -> None:
    """Send the alert that tells the peer what is wrong, and give the peer time to read it."""
    wire, alert = stream._wire, stream._outgoing.read()
    with trio.move_on_after(ALERT_TIMEOUT), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        if alert:
            await wire.send_all(alert)
            await wire.send_eof()
            while await wire.receive_some():  # closing with unread data resets the connection, which may lose the alert
                pass


def check_context(context: ssl.SSLContext, *, verifies: bool) -> None:
    """Check that a context doesn't accept what this transport promises to refuse, and set three options.

    The minimum version becomes TLS 1.2 if the context has none, as on Debian. A connection that is cut without
    close_notify counts as an error, which isn't the default in early releases of Python 3.11. Renegotiation is turned
    off, because during a renegotiation a write would have to wait for a read. TLS 1.3 doesn't have it.

    Raises:
        ValueError: if the context allows versions before TLS 1.2, or if `verifies` is set and the context doesn't
            verify the peer.
    """
    if context.minimum_version is ssl.TLSVersion.MINIMUM_SUPPORTED:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    context.options |= ssl.OP_NO_RENEGOTIATION
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
    """Describe why TLS failed. The text contains none of the transferred data."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate was refused: {error.verify_message}"
    if _is_cut_off(error):
        return "cut off without close_notify, so data may be missing"
    alert = alert_of(error)
    if alert is not None:
        return f"the peer refused the connection: {alert}{f'; {GIVE_ONE}' if alert == 'certificate required' else ''}"
    reason = (error.reason or type(error).__name__).replace("_", " ").lower()
    return f"TLS failed: {reason}{NO_TLS if error.reason in FOREIGN else ''}"


def _is_cut_off(error: ssl.SSLError) -> bool:
    return isinstance(error, ssl.SSLEOFError) or "UNEXPECTED_EOF" in (error.reason or "")


protect_package("muxkit_adapters")
