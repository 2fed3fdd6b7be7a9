"""How does Trio's DTLS become a link? With sizes checked, a goodbye, and an identity."""

from __future__ import annotations

import errno
import math
from typing import TYPE_CHECKING

import trio

from .._errors import HandshakeFailed
from ._old_wire import TOO_LARGE, Wire
from .certificates import ALERTS, DTLS_1_2, SSL, Context, Verdict, identity_of, reason_of, verifies
from .options import Address, Buffers, PacketStats, PacketTooLarge, Refusals, loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sockets import PacketSocket

BURST = 32  # packets encrypted before the kernel is asked to take them


class DtlsLink(trio.abc.Channel[bytes]):
    """Encrypted packets with one peer; each arrives whole and unchanged or not at all, perhaps late."""

    def __init__(
        self,
        channel: trio.DTLSChannel,
        wire: Wire,
        packets: PacketSocket,
        peer: str,
        *,
        hostname: str | None = None,
        largest: int,
        refusals: Refusals,
        idle: float = math.inf,
    ) -> None:
        self._channel = channel
        # Trio keeps the connection to itself, and has no other way to a certificate or a goodbye.
        self._ssl: SSL.Connection = channel._ssl
        self._wire = wire
        self._packets = packets
        self._peer = peer
        self._largest = largest
        self._refusals = refusals
        self._idle = idle
        self._heard_at = trio.current_time()
        self._address: Address = channel.peer_address
        self._verdict = Verdict(hostname)
        self._handshake = trio.CancelScope()
        self._limit = 0
        self._identity: bytes | None = None
        self._is_closed = False
        self._is_over = False
        self._broken: OSError | str | None = None
        self._received = self._received_bytes = self._sent = self._sent_bytes = self._lost = 0
        channel.set_ciphertext_mtu(self._room())

    async def shake_hands(self, context: Context, *, within: float, retransmit: float) -> None:
        """Raises `HandshakeFailed` with the reason, or ConnectionError when the network says that nobody is there."""
        verdict, peer = self._verdict, self._peer
        verdict.watch(self._ssl, context.get_verify_mode())
        self._handshake.deadline = trio.current_time() + within
        failure: Exception | None = None
        with self._handshake:
            try:
                await self._channel.do_handshake(initial_retransmit_timeout=retransmit)
            except (SSL.Error, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                failure = error
        if isinstance(self._broken, OSError):
            raise type(self._broken)(self._broken.errno, f"{peer}: {self._broken.strerror}") from self._broken
        if verdict.reason is not None:
            raise HandshakeFailed(f"{peer}: the certificate was refused: {verdict.reason}")
        if self._handshake.cancelled_caught:
            said = "" if verdict.alert is None else f"; the peer says: {ALERTS.get(verdict.alert, verdict.alert)}"
            raise HandshakeFailed(f"{peer}: the DTLS handshake was not over within {within:g} s{said}")
        if failure is not None:
            reason = (
                reason_of(failure) if isinstance(failure, SSL.Error) else str(failure) or "the handshake was cut off"
            )
            raise HandshakeFailed(f"{peer}: {reason}") from failure
        if self._ssl.get_protocol_version() > DTLS_1_2:  # versions of DTLS count downwards
            raise HandshakeFailed(f"{peer}: speaks {self._ssl.get_protocol_version_name()}, and DTLS 1.2 is the least")
        self._limit = self._channel.get_cleartext_mtu()
        self._identity = identity_of(self._ssl) if verifies(context) else None

    # What the wire says

    def heard(self, packets: Sequence[bytes]) -> None:
        """Something came from the peer's address."""
        self._heard_at = trio.current_time()
        if not self._limit:
            for packet in packets:
                self._verdict.heard(packet)

    def told(self) -> None:
        """A packet of the handshake has been sent to the peer; if it was the alert, the handshake is over."""
        if self._verdict.reason is not None:
            self._handshake.cancel()

    @property
    def expires(self) -> float:
        """When it will have been silent for too long."""
        return self._heard_at + self._idle

    # The face of a link

    @property
    def peer(self) -> str:
        """The other end, for people: `dtls example.org:7000`."""
        return self._peer

    @property
    def identity(self) -> bytes | None:
        """The peer's certificate as DER, if it was verified; None for a peer that showed none, or was not asked."""
        return self._identity

    @property
    def packet_limit(self) -> int:
        """The largest packet that can be sent now, in bytes: what encryption leaves of what fits the path."""
        return self._limit

    @property
    def path_mtu(self) -> int | None:
        """The largest IP packet that the kernel believes the path takes, headers included; None where it does not say.

        Asking also renews `packet_limit`.
        """
        if self._is_closed or self._packets.is_closed:
            return None
        self._channel.set_ciphertext_mtu(self._room())
        self._limit = self._channel.get_cleartext_mtu()
        return self._packets.path_mtu(self._target())

    @property
    def buffers(self) -> Buffers:
        """The kernel's buffers for the socket, asked for and granted."""
        return self._packets.buffers

    def stats(self) -> PacketStats:
        """What became of the packets so far; those of the handshake are not in it."""
        return PacketStats(
            received=self._received,
            received_bytes=self._received_bytes,
            sent=self._sent,
            sent_bytes=self._sent_bytes,
            dropped=self._channel.statistics().incoming_packets_dropped_in_trio,
            lost=self._lost,
            refused=self._refusals.total,
        )

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ", lost" if self._broken is not None else ""
        return f"<DtlsLink {self._peer} {self._ssl.get_protocol_version_name()}{state}>"

    # Sending

    async def send(self, value: bytes) -> None:
        """Encrypt one packet and hand it to the kernel; cancelled, it was not sent.

        Raises `PacketTooLarge`, ValueError for an empty packet, which DTLS does not carry, and BrokenResourceError
        once the peer is known to be gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        try:
            while not self.send_nowait([value]):
                await self._packets.wait_writable()
                waited = True
        finally:
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    def send_nowait(self, packets: Sequence[bytes]) -> int:
        """Send what the kernel takes now, in order; give how many went.

        Raises as `send`, and if a packet has the wrong size none has been sent.
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
            # What the kernel does not take now is encrypted again: to the peer it is a packet that was lost.
            try:
                taken = self._wire.send_nowait(burst, self._address)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                taken = self._refuse_large(sizes[done], bool(done))
            self._lost += self._packets.lost - lost
            self._sent += taken
            self._sent_bytes += sum(sizes[done : done + taken])
            done += taken
            self._check_open()
            if taken < len(burst):
                break
        return done

    def _refuse_large(self, size: int, is_begun: bool) -> int:
        """The path became narrower than we knew; what was sent before must be told first."""
        mtu = self.path_mtu
        if mtu is None:  # a system that does not say how much it would be
            self._largest -= self._limit - size + 1
            self._limit = size - 1
        if size <= self._limit:
            self._packets.lost += 1  # it would fit now: what came back was about an earlier one
            return 1
        if is_begun:
            return 0
        raise PacketTooLarge(self._peer, size, self._limit, mtu)

    def _seal(self, packet: bytes) -> bytes:
        try:
            self._ssl.write(packet)
            return self._ssl.bio_read(TOO_LARGE)
        except SSL.Error as error:
            raise trio.BrokenResourceError(f"{self._peer}: {reason_of(error)}") from error

    # Receiving

    async def receive(self) -> bytes:
        """The next packet; cancelled, none is lost.

        Raises EndOfChannel once the peer has said goodbye, BrokenResourceError once it is known to be gone.
        """
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
        """What has come already, at most `limit` packets."""
        self._check_receivable()
        packets: list[bytes] = []
        while len(packets) < limit:
            try:
                self._ssl.bio_write(self._channel._q.r.receive_nowait())
                packet = self._ssl.read(TOO_LARGE)
            except SSL.WantReadError:
                continue  # a forged packet, or one that came twice
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
        """Say goodbye with close_notify, which may be lost like any packet, and end."""
        if not self._is_closed:
            self._is_closed = True
            self._say_goodbye()
            self._channel.close()
        await trio.lowlevel.checkpoint()

    def _say_goodbye(self) -> None:
        if self._broken is not None or not self._limit or self._packets.is_closed:
            return
        try:
            self._ssl.shutdown()
            goodbye = self._ssl.bio_read(TOO_LARGE)
        except SSL.Error:
            return
        self._wire.send_nowait([goodbye], self._address)

    def refused(self, error: OSError) -> bool:
        """The network says that nobody is there; whether that ended the link."""
        if self._broken is None and self._refusals.refused():
            self._break(error)
            return True
        return False

    def forget(self, reason: str) -> None:
        """Called by the table of peers."""
        if self._broken is None:
            self._break(reason)

    def _break(self, why: OSError | str) -> None:
        self._broken = why
        self._channel.close()  # wakes who receives

    def _lose(self, reason: str) -> Exception:
        if self._broken is None:
            self._break(reason or "the DTLS connection is gone")
        return loss(self._peer, self._broken or reason)

    def _ended(self, error: SSL.Error) -> Exception:
        if isinstance(error, SSL.ZeroReturnError):
            self._is_over = True
            self._channel.close()
            return trio.EndOfChannel()
        return self._lose(reason_of(error))

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this link was closed on our side")
        if self._broken is not None:
            raise loss(self._peer, self._broken)
        if self._is_over:
            raise trio.BrokenResourceError(f"{self._peer}: the peer has said goodbye")

    def _check_receivable(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this link was closed on our side")
        if self._is_over:
            raise trio.EndOfChannel
        if self._broken is not None:
            raise loss(self._peer, self._broken)

    def _room(self) -> int:
        return min(self._largest, self._packets.room_on_path(self._target()))

    def _target(self) -> Address | None:
        return None if self._wire.is_connected else self._address
