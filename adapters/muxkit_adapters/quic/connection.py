"""aioquic's connection with limits: credit follows consumption, unsent data is counted, and idle streams cost no time.

aioquic grants new credit when data arrives, even if nobody reads it, and queues all data that it is given to send. Both
can only be changed through its private names. This is the only file that uses them, and `compatibility.py` checks that
the installed aioquic has them.
"""

from __future__ import annotations

import logging
import secrets
import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aioquic.quic.connection import QuicConnection, QuicConnectionError, QuicConnectionState, QuicReceiveContext
from aioquic.quic.packet import QuicErrorCode, pull_ack_frame
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.stream import QuicStream
from aioquic.tls import Alert, AlertDescription, AlertUnsupportedCertificate, Epoch, verify_certificate
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from .congestion import LatePacer
from .credit import Credit, Granted, GrantedStreams

if TYPE_CHECKING:
    from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # it is documented there
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicNetworkPath
    from aioquic.quic.events import ConnectionTerminated
    from aioquic.quic.logger import QuicLoggerTrace
    from aioquic.quic.recovery import QuicPacketSpace
    from aioquic.tls import CipherSuite, Context, Direction, SessionTicketFetcher, SessionTicketHandler

CRYPTO_MOST = 128 * 1024  # bytes that a peer may send in each of the three parts of the handshake
GAPS_MOST = 1024  # gaps between the pieces of one stream that arrived out of order
SKIP_EVERY = 256  # packets, on average, after which we skip a number; a peer that acknowledges it is cheating
FORGET_MOST = 64  # finished streams that may wait for the next packet, when aioquic discards them

# Without a handler, aioquic's warnings about a peer would go to standard error. We raise them as errors instead.
logging.getLogger("quic").addHandler(logging.NullHandler())


class CertificateRequired(Alert):
    """The client presented no certificate."""

    description = AlertDescription.certificate_required


class LimitedConnection(QuicConnection):
    """aioquic's connection, with unidirectional streams whose cost is bounded in both directions."""

    def __init__(
        self,
        configuration: QuicConfiguration,
        *,
        streams: int,
        window_most: int,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
        session_ticket_fetcher: SessionTicketFetcher | None = None,
        session_ticket_handler: SessionTicketHandler | None = None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
            session_ticket_fetcher=session_ticket_fetcher,
            session_ticket_handler=session_ticket_handler,
        )
        self.trace: QuicLoggerTrace | None = self._quic_logger  # kept, because aioquic drops it at the end
        self._streams: Streams = Streams()
        self._data = Granted(self._local_max_data, configuration.max_data)
        self._peer_streams = GrantedStreams(self._local_max_streams_uni, streams)
        self._local_max_data = self._data
        self._local_max_streams_uni = self._peer_streams
        self._local_max_streams_bidi = Granted(self._local_max_streams_bidi, 0)
        self.incoming: Credit = Credit(
            first=configuration.max_stream_data,
            most=window_most,
            data=self._data,
            streams=self._peer_streams,
            grant=self._grant,
        )
        self._pacer = Pacer(self._loss._cc, max_datagram_size=configuration.max_datagram_size)
        self._loss._pacer = self._pacer
        self._unacked: dict[int, QuicStream] = {}
        self._given_up = self._streams.given_up
        self._committed = 0  # bytes written against the peer's credit for the connection
        self._is_ended_by_us: bool | None = None  # None before the end and after a timeout
        self._skipped: int | None = None
        self._skip_at = secrets.randbelow(SKIP_EVERY)
        self._measured = 0.0  # the last sample of the round trip that `incoming` was given
        self.buffered: int = 0
        """Bytes that were written but not acknowledged."""

    # --- state

    @property
    def ending(self) -> ConnectionTerminated | None:
        """Why the connection has ended, or None. It is known slightly before aioquic's event for it."""
        return self._close_event

    @property
    def awaits_verdict(self) -> bool:
        """True while a server that requested this client's certificate hasn't accepted it yet.

        A TLS 1.3 client completes its handshake before the server has seen the certificate. HANDSHAKE_DONE (RFC 9001,
        4.1.2) is the first frame that shows that the server has accepted it.
        """
        return self._is_client and self.tls._certificate_request is not None and not self._handshake_confirmed

    @property
    def is_ended_by_peer(self) -> bool:
        """True if the peer closed the connection."""
        return self._is_ended_by_us is False

    @property
    def is_timed_out(self) -> bool:
        """True if the connection ended because nothing arrived within the idle timeout."""
        return self.is_terminated and self._is_ended_by_us is None

    @property
    def certificate(self) -> x509.Certificate | None:
        """The peer's certificate, if it was verified."""
        return None if self.configuration.verify_mode is ssl.CERT_NONE else self.tls._peer_certificate

    @property
    def is_terminated(self) -> bool:
        """True once nothing is sent or received any more, not even another close frame."""
        return self._state is QuicConnectionState.TERMINATED

    @property
    def round_trip(self) -> float | None:
        """The smoothed round-trip time in seconds, or None before the first measurement."""
        return self._loss._rtt_smoothed if self._loss._rtt_initialized else None

    @property
    def unsent(self) -> int:
        """About how many bytes were written and are not under way: they wait for the congestion window."""
        return max(0, self.buffered - self._loss.bytes_in_flight)

    @property
    def datagram_limit(self) -> int:
        """The size of the largest datagram that fits into a packet and that the peer accepts."""
        peer = self._remote_max_datagram_frame_size or 0
        packet = self._max_datagram_size - 3 - len(self._peer_cid.cid) - 16
        return max(0, min(packet, peer - 1) - 3)  # 3 for the frame's type and length; aioquic requires less than `peer`

    @property
    def waiting_datagrams(self) -> int:
        """The number of datagrams that aioquic has not sent yet."""
        return len(self._datagrams_pending)

    def has_output(self, now: float) -> bool:
        """Return False if `datagrams_to_send` would return nothing. Cheap. In case of doubt, the result is True."""
        space = self._spaces[Epoch.ONE_RTT] if self._handshake_confirmed else None
        return (
            space is None
            or (space.ack_at is not None and space.ack_at <= now)
            or self._data.granted != self._data.sent
            or self._peer_streams.is_due
            or bool(self._streams.due or self._datagrams_pending or self._ping_pending or self._retire_connection_ids)
            or self._close_pending
            or self._probe_pending
            or self._handshake_done_pending
            or not self._crypto_streams[Epoch.ONE_RTT].sender.buffer_is_empty
            or len(self._queue) > FORGET_MOST
            or any(map(_has_output, self._queue))
            or not all(connection_id.was_sent for connection_id in self._host_cids)
            or not all(path.is_validated and not path.remote_challenges for path in self._network_paths)
        )

    # --- streams that we write

    @property
    def may_open(self) -> bool:
        """True if the peer allows another stream."""
        return self._local_next_stream_id_uni // 4 < self._remote_max_streams_uni

    def open(self) -> int:
        """Open a unidirectional stream and return its id."""
        stream_id = self.get_next_available_stream_id(is_unidirectional=True)
        self.send_stream_data(stream_id, b"")
        return stream_id

    def is_writable(self, stream_id: int) -> bool:
        """Return True if the stream is open: neither finished nor reset."""
        stream = self._streams.get(stream_id)
        return stream is not None and stream.sender._buffer_fin is None and stream.sender._reset_error_code is None

    def credit(self, stream_id: int) -> int:
        """Return how many more bytes of this stream the peer accepts now."""
        if not self.is_writable(stream_id):
            return 0
        stream = self._streams[stream_id]
        mine = stream.max_stream_data_remote - stream.sender._buffer_stop
        return max(0, min(mine, self._remote_max_data - self._committed))

    def has_sent_all(self, stream_id: int) -> bool:
        """Return True if none of a stream's data waits to be sent."""
        stream = self._streams.get(stream_id)
        return stream is None or not len(stream.sender._pending)

    def write(self, stream_id: int, data: bytes, is_last: bool) -> None:
        """Queue data of a stream. The caller has checked `credit`."""
        self.send_stream_data(stream_id, data, is_last)
        stream = self._streams[stream_id]
        self._unacked[stream_id] = stream
        self._queue.append(stream)
        self.buffered += len(data)
        self._committed += len(data)

    def give_up(self, stream_id: int) -> bool:
        """Reset a stream, because we or the peer gave it up. Return False if it was reset before."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.sender.is_finished:
            return False
        sender = stream.sender
        self.reset_stream(stream_id, 0)
        self._queue.append(stream)
        if stream_id in self._given_up:
            return False
        self._given_up.add(stream_id)
        self._committed -= sender._buffer_stop - sender.highest_offset
        sender._buffer = bytearray()  # the data won't be sent again
        self._unacked.pop(stream_id, None)
        self.look_at_sent()
        return True

    def look_at_sent(self) -> None:
        """Update `buffered` and the queue after acknowledgements and losses."""
        buffered = 0
        done = []
        for stream_id, stream in self._unacked.items():
            sender = stream.sender
            if sender.is_finished:
                done.append(stream_id)
                self._queue.append(stream)  # so that aioquic discards it
                continue
            left = sender._buffer_stop - sender._buffer_start
            if not left and sender._buffer_fin is None:
                done.append(stream_id)
            elif not sender.buffer_is_empty:
                self._queue.append(stream)
            buffered += left
        for stream_id in done:
            del self._unacked[stream_id]
        self.buffered = buffered

    @property
    def is_all_delivered(self) -> bool:
        """True if all data was acknowledged and all datagrams were sent."""
        return not self._unacked and not self._datagrams_pending

    # --- streams that the peer writes

    def arrived(self, stream_id: int, size: int, is_last: bool, now: float) -> None:
        """Count bytes of a stream that were delivered to the application."""
        self.incoming.arrived(stream_id, size, now)
        if is_last:
            self.has_ended(stream_id, now)

    @property
    def withheld(self) -> int:
        """The number of the peer's streams that have ended but don't make room for new ones yet."""
        return self._peer_streams.withheld

    @withheld.setter
    def withheld(self, count: int) -> None:
        self._peer_streams.withheld = count

    def has_ended(self, stream_id: int, now: float) -> None:
        """Handle the end of one of the peer's streams."""
        stream = self._streams[stream_id]
        self._streams.due.pop(stream_id, None)
        self._queue.append(stream)  # so that aioquic discards it
        self.incoming.ended(stream_id, stream.receiver.highest_offset, now)

    def stop(self, stream_id: int) -> bool:
        """Ask the peer to reset a stream. Return False if it has ended already."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.receiver.is_finished:
            return False
        self.stop_stream(stream_id, 0)
        self._queue.append(stream)
        return True

    def _grant(self, stream_id: int, limit: int) -> None:
        stream = self._streams[stream_id]
        stream.max_stream_data_local = limit
        self._streams.due[stream_id] = stream

    # --- overridden methods of aioquic

    @property
    def _streams_queue(self) -> list[QuicStream]:
        return self._queue

    @_streams_queue.setter
    def _streams_queue(self, streams: list[QuicStream]) -> None:
        self._queue = StreamQueue(filter(_has_work, streams)) if streams else StreamQueue()

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Any]]:
        """Return packets to send, as in aioquic. Also skips packet numbers and sends acknowledgements along."""
        if self._handshake_confirmed and self._packet_number >= self._skip_at:
            self._skipped = self._packet_number
            self._packet_number += 1
            self._skip_at = self._packet_number + SKIP_EVERY // 2 + secrets.randbelow(SKIP_EVERY)
        if self._handshake_confirmed and (space := self._spaces[Epoch.ONE_RTT]).ack_at is not None:
            space.ack_at = min(space.ack_at, now)  # send the acknowledgement with the packet that is due anyway
        if self._close_pending and self._handshake_complete and not self._handshake_confirmed:
            # Packets of the handshake can't carry the code and reason of an application.
            self._handshake_confirmed = True
        return super().datagrams_to_send(now)

    def _write_application(self, builder: QuicPacketBuilder, network_path: QuicNetworkPath, now: float) -> None:
        self._pacer.builder = builder
        try:
            super()._write_application(builder, network_path, now)
        finally:
            self._pacer.builder = None

    def _close_begin(self, is_initiator: bool, now: float) -> None:
        self._is_ended_by_us = is_initiator
        super()._close_begin(is_initiator, now)

    def _initialize(self, peer_cid: bytes) -> None:
        if not (self._is_client and self._retry_count):
            super()._initialize(peer_cid)
        else:
            # After a Retry, a client has to send the same ClientHello again (RFC 9000, 17.2.5.3). aioquic would create
            # a new one with four new key pairs, which a server may refuse.
            tls, hello = self.tls, bytes(self._crypto_streams[Epoch.INITIAL].sender._buffer)
            super()._initialize(peer_cid)
            self.tls: Context = tls
            self._crypto_buffers[Epoch.INITIAL].push_bytes(hello)
        self.tls._max_early_data = None  # early data can be replayed, so we don't offer it
        if not self._is_client and self.configuration.verify_mode is ssl.CERT_REQUIRED:
            # aioquic can request a certificate and checks that the client has its key, but not which CA issued it.
            self.tls._request_client_certificate = True
            self.tls._server_expect_finished = self._expect_finished_of_client  # type: ignore[method-assign]

    def _expect_finished_of_client(self) -> None:
        """Continue the handshake if the server accepts the client's certificate."""
        certificate = self.tls._peer_certificate
        if certificate is None:
            raise CertificateRequired("this server wants a client certificate: tls=muxkit.TLS(cert=…, key=…)")
        verify_certificate(certificate, self.tls._peer_certificate_chain, cadata=self.configuration.cadata)
        if not may_authenticate_clients(certificate):
            raise AlertUnsupportedCertificate("the certificate is not for clients")
        type(self.tls)._server_expect_finished(self.tls)

    def _update_traffic_key(self, direction: Direction, epoch: Epoch, cipher_suite: CipherSuite, secret: bytes) -> None:
        if epoch is Epoch.ZERO_RTT and not self._is_client:
            self.tls.early_data_accepted = False  # tells a client that sends early data anyway that we refused it
            return
        super()._update_traffic_key(direction, epoch, cipher_suite, secret)

    def _write_stream_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream) -> None:
        highest, stream.receiver.highest_offset = stream.receiver.highest_offset, 0  # or aioquic would double the limit
        try:
            super()._write_stream_limits(builder=builder, space=space, stream=stream)
        finally:
            stream.receiver.highest_offset = highest
        self._streams.due.pop(stream.stream_id or 0, None)

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        super()._on_max_stream_data_delivery(delivery, stream)
        if delivery is not QuicDeliveryState.ACKED and not stream.receiver.is_finished:
            self._streams.due[stream.stream_id or 0] = stream

    def _handle_ack_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        start = buf.tell()
        largest = buf.pull_uint_var()
        buf.seek(start)
        is_lying = largest >= self._packet_number
        if not is_lying and self._skipped is not None and largest >= self._skipped:
            try:
                ranges, _ = pull_ack_frame(buf)
            except ValueError:
                pass  # the base class parses the frame again and rejects it
            else:
                is_lying = self._skipped in ranges
            buf.seek(start)
        if is_lying:
            raise _violation(
                QuicErrorCode.PROTOCOL_VIOLATION, frame_type, "a packet was acknowledged that was not sent"
            )
        super()._handle_ack_frame(context, frame_type, buf)
        if self._loss._rtt_initialized and self._loss._rtt_latest != self._measured:
            self._measured = self._loss._rtt_latest
            self.incoming.round_trip.measured(self._measured)

    def _handle_crypto_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        start = buf.tell()
        end = buf.pull_uint_var() + buf.pull_uint_var()
        buf.seek(start)
        if end > CRYPTO_MOST:
            raise _violation(
                QuicErrorCode.CRYPTO_BUFFER_EXCEEDED, frame_type, f"{end} bytes of handshake against {CRYPTO_MOST}"
            )
        super()._handle_crypto_frame(context, frame_type, buf)
        self._check_gaps(self._crypto_streams[context.epoch], frame_type)

    def _handle_stream_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        start = buf.tell()
        stream_id = buf.pull_uint_var()
        buf.seek(start)
        super()._handle_stream_frame(context, frame_type, buf)
        self._check_gaps(self._streams[stream_id], frame_type)

    def _check_gaps(self, stream: QuicStream, frame_type: int) -> None:
        gaps = len(stream.receiver._ranges)
        if gaps > GAPS_MOST:
            raise _violation(QuicErrorCode.INTERNAL_ERROR, frame_type, f"{gaps} gaps in a stream against {GAPS_MOST}")


class Pacer(LatePacer):
    """A pacer that doesn't count packets that only acknowledge, because they aren't subject to congestion control.

    aioquic counts them. So a side that receives bulk data and acknowledges it would delay its own short messages.
    """

    builder: QuicPacketBuilder | None = None
    """The builder that has just finished the packet for which `update_after_send` is called."""

    def update_after_send(self, now: float) -> None:
        packet = None if self.builder is None else self.builder._packet
        if packet is None or packet.in_flight:
            super().update_after_send(now)


class Streams(dict[int, QuicStream]):
    """The streams by number.

    aioquic iterates over `values()` for each packet. So `values()` contains only the streams with a new limit to send,
    and idle streams cost no time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.due: dict[int, QuicStream] = {}
        self.given_up: set[int] = set()

    def values(self) -> Any:  # noqa: ANN401 - a dict returns a view, and this returns a list
        return [*self.due.values()]

    def pop(self, stream_id: int, *default: Any) -> Any:  # noqa: ANN401 - the signature of a dict
        self.due.pop(stream_id, None)
        self.given_up.discard(stream_id)
        return super().pop(stream_id, *default)


class StreamQueue(list[QuicStream]):
    """The streams that aioquic has to write or discard, each once."""

    def __init__(self, streams: Iterable[QuicStream] = ()) -> None:
        super().__init__()
        self._ids: set[int | None] = set()
        self.extend(streams)

    def append(self, stream: QuicStream) -> None:
        if stream.stream_id not in self._ids:
            self._ids.add(stream.stream_id)
            super().append(stream)

    def extend(self, streams: Iterable[QuicStream]) -> None:
        for stream in streams:
            self.append(stream)


def _has_work(stream: QuicStream) -> bool:
    return stream.is_finished or _has_output(stream)


def _has_output(stream: QuicStream) -> bool:
    sender = stream.sender
    return stream.receiver.stop_pending or sender.reset_pending or len(sender._pending) > 0 or sender._pending_eof


def _violation(code: QuicErrorCode, frame_type: int, reason: str) -> QuicConnectionError:
    return QuicConnectionError(error_code=code, frame_type=frame_type, reason_phrase=reason)


def may_authenticate_clients(certificate: x509.Certificate) -> bool:
    """Return True if a certificate may be used by clients, or doesn't restrict its purpose."""
    try:
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    except ValueError:  # extensions are parsed on access, and invalid ones raise ValueError
        return False
    return ExtendedKeyUsageOID.CLIENT_AUTH in purposes or ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE in purposes
