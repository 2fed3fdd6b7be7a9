"""DTLS links and their listener, on top of Trio's DTLS endpoint.

Trio implements the handshake with cookies and retransmissions, and pyOpenSSL the cryptography. This module works around
four problems of that combination, each explained where it is solved: repeated flights (`DtlsLink._step`), the lock
around sending (`endpoint_on`), packets that arrive during the handshake (`DtlsLink._keep_early_packets`), and errors
about earlier packets (`EndpointSocket`).
"""

from __future__ import annotations

import errno
import math
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import trio

from muxkit import Identity
from muxkit.runtime import Place, source_of, turns

from .._addresses import CERTIFICATE_REQUIRED, join_host_port
from .._errors import HandshakeFailed, failed
from .certificates import ALERTS, DTLS_1_2, SSL, Context, Verdict, identity_of, reason_of, verifies
from .links import CLOSED, PacketLink
from .listeners import PacketListener, PeerPlace, Peers
from .options import TURN, Address, ListenerOptions, PacketOptions, PacketTooLarge, loss
from .sockets import PacketSocket

BURST = 32  # packets to encrypt before the kernel is asked to accept them
INBOX = 256  # packets that may wait for the handler of one peer
ALERT_GRACE = 1.0  # s
PATIENCE = 20.0  # s that a peer waiting for a place may be silent; most pauses between its packets are shorter
CHANGE_CIPHER_SPEC, HANDSHAKE = 20, 22  # record types
RECORD_HEADER = 13  # bytes: type, version (2), epoch (2), sequence number (6), length (2)
LARGEST_RECORD = 18_500  # bytes; every DTLS record is smaller, so larger packets are dropped


class DtlsLink(PacketLink):
    """Encrypted packets exchanged with one peer. A packet arrives whole and unchanged or not at all, and may be late.

    DTLS can't carry empty packets, so `send` raises ValueError for one.
    """

    def __init__(
        self,
        channel: trio.DTLSChannel,
        packets: PacketSocket,
        peer: str,
        options: PacketOptions,
        *,
        hostname: str | None = None,
        idle: float = math.inf,
    ) -> None:
        super().__init__(packets, peer, channel.peer_address, options)
        self._channel = channel
        # Trio keeps the connection private, and offers no other access to the certificate or to close_notify.
        self._ssl: SSL.Connection = channel._ssl
        self._idle = idle
        self._heard_at = trio.current_time()
        self._verdict = Verdict(hostname)
        self._handshake = trio.CancelScope()
        self._heeds_alerts = False
        self._identity: Identity | None = None
        self._is_over = False
        self._early: deque[bytes] = deque()
        self.place: Place | None = None
        """The place of this link at its listener, while the handshake runs."""
        self.patience: trio.CancelScope = trio.CancelScope(deadline=self._heard_at + PATIENCE)
        """Ends this link's wait for a place when the peer has been silent for too long."""
        channel.set_ciphertext_mtu(self._room())
        self._handshake_step: Callable[[], None] = self._ssl.do_handshake
        self._flight = b""  # output of the last handshake step, until Trio reads it
        self._last_message = -1  # number of the last handshake message that was sent
        self._has_changed_cipher = False  # a ChangeCipherSpec was sent
        vars(self._ssl).update(do_handshake=self._step, bio_read=self._take_flight)

    def _step(self) -> None:
        """Do one step of the handshake, and remove messages that OpenSSL repeats from the previous flight.

        Trio has its own retransmission timer. OpenSSL has one too, of one second, and checks it during the step. If it
        has expired, OpenSSL puts the old flight in front of the new one. Trio would take both for a repetition and drop
        them, and the handshake would never end.
        """
        bio_read = type(self._ssl).bio_read
        try:
            self._handshake_step()
        finally:
            flight = b""
            with suppress(SSL.Error):
                while record := bio_read(self._ssl, LARGEST_RECORD):
                    flight += record
            self._flight += self._without_repetition(flight)

    def _take_flight(self, _: int) -> bytes:
        if not self._flight:
            raise SSL.WantReadError
        flight, self._flight = self._flight, b""
        return flight

    def _without_repetition(self, flight: bytes) -> bytes:
        """Return the records of a flight, starting with the first message that wasn't sent before."""
        repeated, at = 0, 0
        while len(flight) >= at + RECORD_HEADER:
            kind, epoch = flight[at], int.from_bytes(flight[at + 3 : at + 5])
            size = RECORD_HEADER + int.from_bytes(flight[at + 11 : at + 13])
            if kind == CHANGE_CIPHER_SPEC:
                if repeated and self._has_changed_cipher:
                    return b""  # nothing follows the first ChangeCipherSpec and the Finished message after it
                self._has_changed_cipher = True
            elif kind == HANDSHAKE and not epoch:
                message = int.from_bytes(flight[at + RECORD_HEADER + 4 : at + RECORD_HEADER + 6])
                if message <= self._last_message and repeated == at:
                    repeated += size
                self._last_message = max(self._last_message, message)
            at += size
        return flight[repeated:]

    async def shake_hands(
        self, *, within: float, retransmit: float, heeds_alerts: bool = False, shows_nothing: bool = False
    ) -> None:
        """Do the handshake.

        Args:
            within: seconds for the handshake.
            retransmit: seconds until a lost packet is retransmitted for the first time.
            heeds_alerts: end the handshake `ALERT_GRACE` seconds after a fatal alert of the peer. Alerts aren't
                authenticated, so anybody could have forged it. If the handshake still succeeds within that time, the
                alert was forged.
            shows_nothing: True if this side has no certificate to present.

        Raises:
            HandshakeFailed: if one side rejects the other, or if the handshake takes too long.
            OSError: if the network reports the peer as unreachable.
        """
        self._heeds_alerts = heeds_alerts
        verdict, peer, context = self._verdict, self._peer, self._ssl.get_context()
        verdict.watch(self._ssl, context.get_verify_mode())
        self._handshake.deadline = trio.current_time() + within
        failure: Exception | None = None
        with self._handshake:
            try:
                await self._channel.do_handshake(initial_retransmit_timeout=retransmit)
            except (SSL.Error, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                failure = error
        if isinstance(self._broken, OSError):
            raise failed(peer, self._broken) from self._broken
        if verdict.reason is not None:
            text = f"{peer}: the certificate was refused: {verdict.reason}"
            raise HandshakeFailed(text, alert="bad certificate")
        if self._handshake.cancelled_caught and self._heeds_alerts and verdict.alert is not None:
            alert = ALERTS.get(verdict.alert, f"alert {verdict.alert}")
            # DTLS 1.2 has no alert for a missing certificate. If the server has presented its own certificate, both
            # sides have agreed on a cipher, so "handshake failure" must be about our certificate.
            is_missing = shows_nothing and alert == "handshake failure" and self._ssl.get_peer_certificate() is not None
            text = CERTIFICATE_REQUIRED if is_missing else f"the peer refused the connection: {alert}"
            raise HandshakeFailed(f"{peer}: {text}", alert="certificate required" if is_missing else alert)
        if self._handshake.cancelled_caught:
            said = "" if verdict.alert is None else f"; the peer says: {ALERTS.get(verdict.alert, verdict.alert)}"
            said = said or " (handshake_timeout=)"
            raise HandshakeFailed(f"{peer}: the DTLS handshake was not over within {within:g} s{said}")
        if failure is not None:
            reason = (
                reason_of(failure) if isinstance(failure, SSL.Error) else str(failure) or "the handshake was cut off"
            )
            raise HandshakeFailed(f"{peer}: {reason}") from failure
        if self._ssl.get_protocol_version() > DTLS_1_2:  # versions of DTLS count downwards
            raise HandshakeFailed(f"{peer}: speaks {self._ssl.get_protocol_version_name()}, and DTLS 1.2 is the least")
        del vars(self._ssl)["bio_read"]
        self._limit = self._channel.get_cleartext_mtu()
        self._identity = identity_of(self._ssl) if verifies(context) else None
        self._keep_early_packets()

    def _keep_early_packets(self) -> None:
        """Keep packets that Trio's handshake received after it had sent the last packet of this side.

        If a retransmission is due at the very moment at which that packet is sent, Trio waits for one more packet and
        doesn't process it. That packet may contain the peer's first data.
        """
        try:
            while True:
                self._early.append(self._ssl.read(LARGEST_RECORD))
        except SSL.ZeroReturnError:
            self._is_over = True
        except SSL.Error:
            pass  # there is nothing more; an invalid record counts as lost

    # Called by the socket and the listener

    def heard(self, packets: Sequence[bytes]) -> None:
        """Record that packets arrived from the peer's address."""
        self._heard_at = trio.current_time()
        if not self._limit:
            if self.place is not None:
                self.place.progressed()  # the address is proved, so the packets are from this peer
            else:
                self.patience.deadline = self._heard_at + PATIENCE
            for packet in packets:
                self._verdict.heard(packet)
            if self._heeds_alerts and self._verdict.alert is not None:
                soon = trio.current_time() + ALERT_GRACE
                self._handshake.deadline = min(self._handshake.deadline, soon)

    def handshake_sent(self) -> None:
        """Record that a packet of the handshake was sent. If it was our alert, the handshake has failed."""
        if self._verdict.reason is not None:
            self._handshake.cancel()

    @property
    def expires(self) -> float:
        return self._heard_at + self._idle

    @property
    def identity(self) -> Identity | None:
        """The identity in the peer's verified certificate. None if the peer presented none or wasn't asked for one."""
        return self._identity

    def _fit_path(self) -> None:
        self._channel.set_ciphertext_mtu(self._room())
        self._limit = self._channel.get_cleartext_mtu()

    def _room(self) -> int:
        return min(self._largest, self._packets.room_on_path(self._address))

    def _count_dropped(self) -> int:
        return self._channel.statistics().incoming_packets_dropped_in_trio

    def __repr__(self) -> str:
        return f"<DtlsLink {self._peer} {self._ssl.get_protocol_version_name()}{self._state()}>"

    # Sending

    def send_nowait(self, packets: Sequence[bytes]) -> int:
        """Send as many packets as the kernel accepts now, in order. Return their number.

        Raises:
            PacketTooLarge: if a packet is larger than `packet_limit`. Then none was sent.
            ValueError: if a packet is empty. Then none was sent.
            trio.BrokenResourceError: if the peer is known to be lost.
        """
        self._check_open()
        if not packets:
            return 0
        sizes = [len(packet) for packet in packets]
        if max(sizes) > self._limit:
            raise PacketTooLarge(self._peer, max(sizes), self._limit)
        if not min(sizes):
            raise ValueError(f"{self._peer}: DTLS carries no empty packets")
        done = 0
        while done < len(packets):
            burst = [self._seal(packet) for packet in packets[done : done + BURST]]
            lost = self._packets.lost
            # A packet that the kernel doesn't accept now is encrypted again later. To the peer, this record is lost.
            try:
                taken = self._packets.send(burst, self._address)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                taken = self._refuse_large(sizes[done], is_begun=done > 0)
            self._lost += self._packets.lost - lost
            self._sent += taken
            self._sent_bytes += sum(sizes[done : done + taken])
            done += taken
            self._check_open()
            if taken < len(burst):
                break
        return done

    def _seal(self, packet: bytes) -> bytes:
        try:
            self._ssl.write(packet)
            return self._ssl.bio_read(LARGEST_RECORD)
        except SSL.Error as error:
            raise trio.BrokenResourceError(f"{self._peer}: {reason_of(error)}") from error

    # Receiving

    async def receive(self) -> bytes:
        """Return the next packet. If cancelled, no packet is lost.

        Raises:
            trio.EndOfChannel: after the peer's close_notify.
            trio.BrokenResourceError: once the peer is known to be lost.
            trio.ClosedResourceError: if the link was closed on this side.
        """
        if self._early and not self._is_closed:
            await trio.lowlevel.checkpoint()
            if early := self.receive_nowait(1):
                return early[0]
        self._check_receivable()
        try:
            packet = await self._channel.receive()
        except SSL.Error as error:
            raise self._ended(error) from None
        except (trio.ClosedResourceError, trio.BrokenResourceError) as error:
            self._check_receivable()
            raise self._lose(str(error)) from None
        self._came(packet)
        return packet

    def receive_nowait(self, limit: int) -> list[bytes]:
        """Return packets that have already been received, at most `limit`."""
        packets: list[bytes] = []
        while self._early and not self._is_closed and len(packets) < limit:
            self._came(packet := self._early.popleft())
            packets.append(packet)
        if packets:
            return packets
        self._check_receivable()
        while len(packets) < limit:
            try:
                self._ssl.bio_write(self._channel._q.r.receive_nowait())
                packet = self._ssl.read(LARGEST_RECORD)
            except SSL.WantReadError:
                continue  # the packet was forged or duplicated
            except SSL.Error as error:
                failure = self._ended(error)
                if packets:
                    break
                raise failure from None
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                break
            self._came(packet)
            packets.append(packet)
        return packets

    def _came(self, packet: bytes) -> None:
        self._refusals.heard()
        self._received += 1
        self._received_bytes += len(packet)

    # The end

    async def aclose(self) -> None:
        """Close the link and send close_notify, which may be lost like any packet."""
        if not self._is_closed:
            self._is_closed = True
            self._send_close_notify()
            self._channel.close()
        await trio.lowlevel.checkpoint()

    def _send_close_notify(self) -> None:
        if self._broken is not None or not self._limit or self._packets.is_closed:
            return
        try:
            self._ssl.shutdown()
            notify = self._ssl.bio_read(LARGEST_RECORD)
        except SSL.Error:
            return
        self._packets.send([notify], self._address)

    def _wake(self) -> None:
        self._channel.close()

    def _lose(self, reason: str) -> Exception:
        self.forget(reason or "the DTLS connection is gone")
        return loss(self._peer, self._broken or reason)

    def _ended(self, error: SSL.Error) -> Exception:
        if isinstance(error, SSL.ZeroReturnError):
            self._is_over = True
            self._channel.close()
            return trio.EndOfChannel()
        return self._lose(reason_of(error))

    def _check_open(self) -> None:
        super()._check_open()
        if self._is_over:
            raise trio.BrokenResourceError(f"{self._peer}: the peer has said goodbye")

    def _check_receivable(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError(CLOSED)
        if self._is_over:
            raise trio.EndOfChannel
        if self._broken is not None:
            raise loss(self._peer, self._broken)


class DtlsListener(PacketListener[DtlsLink]):
    """A bound socket, Trio's DTLS endpoint on it, and the links of its peers."""

    def __init__(
        self,
        sock: socket.socket,
        handler: Callable[[DtlsLink], Awaitable[None]],
        context: Callable[[], Context],
        options: ListenerOptions,
        *,
        retransmit: float,
    ) -> None:
        super().__init__(sock, handler, options)
        self._context = context
        self._retransmit = retransmit

    async def run(self, peers: Peers, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Do the handshakes of new peers and run their handlers, until cancelled."""
        self.peers = peers
        context = self._context()

        def renew() -> None:
            nonlocal context
            if (found := self._context()) is not context:
                context = found
                # Trio prepares the first context in the same way. It has no public way to use another one later.
                context.set_cookie_verify_callback(lambda *_: True)
                context.set_options(SSL.OP_NO_QUERY_MTU | SSL.OP_NO_RENEGOTIATION)
                endpoint._listening_context = context

        wire = EndpointSocket(self.packets, self._links.get, on_packets=renew)
        with endpoint_on(wire) as endpoint:
            await endpoint.serve(context, self._peer, task_status=task_status)

    async def _peer(self, channel: trio.DTLSChannel) -> None:
        """Serve one peer, after it has returned its cookie. Trio closes the channel afterwards."""
        address: Address = channel.peer_address
        link = DtlsLink(
            channel, self.packets, f"dtls {join_host_port(*address[:2])}", self.options, idle=self.options.idle
        )
        self._links[address] = link
        try:
            # A peer that still wants to connect repeats its packet, with the cookie that proves its address. If it
            # was turned away or its patience has ended, the next such packet starts again from here.
            place: PeerPlace | None = None
            with link.patience:
                link.place = place = await self.peers.admit_in_turn(link, source_of(address[0]))
            if place is not None:
                await self.peers.run(link, place, partial(self._shake_hands_and_handle, link, place))
        finally:
            self.options.counters.dropped += link.stats().dropped
            if self._links.get(address) is link:
                del self._links[address]

    async def _shake_hands_and_handle(self, link: DtlsLink, place: PeerPlace) -> None:
        await self.peers.start_handshake(place)
        await link.shake_hands(within=self.options.limits.handshake, retransmit=self._retransmit)
        self.peers.establish(link)
        await self._handle(link)


def endpoint_on(wire: EndpointSocket) -> trio.DTLSEndpoint:
    """Return Trio's DTLS endpoint on a socket, without the lock around sending.

    With the lock, Trio's handshakes take turns, one per pass of its scheduler. If many handshakes run, the timer of one
    may expire while it waits for the lock. Trio then stops sending, and never sends a last flight that it skipped.
    `EndpointSocket.sendto` sends each packet immediately, so it needs no lock.
    """
    endpoint = trio.DTLSEndpoint(wire, incoming_packets_buffer=INBOX)
    vars(endpoint)["_send_lock"] = nullcontext()  # Trio has no public way to do this
    return endpoint


class EndpointSocket(trio.socket.SocketType):
    """The socket of Trio's DTLS endpoint. It keeps errors about earlier packets away from Trio's own task.

    `link_of` returns the link of an address.
    """

    def __init__(
        self,
        packets: PacketSocket,
        link_of: Callable[[Address], DtlsLink | None],
        *,
        on_packets: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._on_packets = on_packets
        self.packets = packets
        self._link_of = link_of
        self._queue: deque[tuple[bytes, Address]] = deque()
        self._clock = turns().now
        self._until = 0.0  # when other tasks have to run

    @property
    def family(self) -> socket.AddressFamily:
        return self.packets.socket.family

    @property
    def type(self) -> socket.SocketKind:
        return self.packets.socket.type

    def getsockname(self) -> Any:  # noqa: ANN401 - as in Trio
        return self.packets.socket.getsockname()

    def close(self) -> None:
        self.packets.close()

    async def recvfrom(self, *_: object) -> tuple[bytes, Any]:
        packets = self.packets
        while not self._queue:
            if packets.has_more:
                await trio.lowlevel.checkpoint()
            else:
                await packets.wait_readable()
            self._on_packets()
            for address, burst in packets.receive():
                link = self._link_of(address)
                if link is not None:
                    link.heard(burst)
                # Any host can send an empty packet, which would raise an error in Trio and end the link.
                self._queue.extend((packet, address) for packet in burst if 0 < len(packet) <= LARGEST_RECORD)
            self._until = self._clock() + TURN
        # Trio processes each packet without a checkpoint, and would continue as long as packets arrive.
        if self._clock() >= self._until:
            await trio.lowlevel.checkpoint()
            self._until = self._clock() + TURN
        return self._queue.popleft()

    async def sendto(self, *arguments: Any) -> int:
        # If the kernel accepts the packet now, there is no checkpoint at which Trio could abandon half a flight.
        packet, address = bytes(arguments[0]), arguments[-1]
        try:
            while not self.packets.send([packet], address):
                await self.packets.wait_writable()
        except OSError:  # too large for the path; the handshake will be repeated with smaller packets
            self.packets.lost += 1
        link = self._link_of(address)
        if link is not None:
            link.handshake_sent()
        return len(packet)
