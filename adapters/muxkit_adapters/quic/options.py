"""Options of QUIC connections, and their translation for aioquic: limits, trust, certificates and tickets.

Both `connect` and `serve` use this module. `QuicOptions` describes the options that they share.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import attrs
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.tls import CipherSuite

from muxkit import TLS, Limits

from . import congestion
from .qlog import DirectoryLogger

if TYPE_CHECKING:
    from aioquic.tls import SessionTicket

log: Final = logging.getLogger("muxkit.adapters")

ALPN = "muxkit-aqueduct"
IDLE_TIMEOUT = 30.0  # s without a packet after which the peer counts as lost
KEEP_ALIVE = 10.0  # s of silence before a ping
STREAM_PRICE = 2 * 1024  # bytes of memory per stream
DATAGRAM_MOST = 65_535  # bytes of the largest DATAGRAM frame that is accepted
QLOG_DIRECTORY = "MUXKIT_QLOGDIR"
TICKETS_MOST = 1024
CIPHERS = [CipherSuite.AES_128_GCM_SHA256, CipherSuite.AES_256_GCM_SHA384, CipherSuite.CHACHA20_POLY1305_SHA256]

Source = str | os.PathLike[str]


class QuicKeywords(TypedDict, total=False):
    """Keywords that both sides of QUIC accept, which `QuicOptions` describes."""

    alpn: Sequence[str]
    streams: int | None
    idle_timeout: float
    keep_alive: float | None
    packet_size: int
    qlog: Source | None


@attrs.frozen(kw_only=True)
class QuicOptions:
    """Options of both sides. Times are in seconds, and sizes are in bytes."""

    alpn: Sequence[str] = (ALPN,)
    limits: Limits = attrs.field(factory=Limits)
    streams: int | None = None
    """The number of the peer's streams that may be open simultaneously. The default is twice `Limits.channels` plus
    256, or less if `Limits.channel_memory` doesn't suffice for that many."""
    idle_timeout: float = IDLE_TIMEOUT
    """The silence after which the peer counts as lost."""
    keep_alive: float | None = KEEP_ALIVE
    """The silence before a ping. None turns pings off."""
    packet_size: int = attrs.field(
        default=SMALLEST_MAX_DATAGRAM_SIZE, validator=attrs.validators.ge(SMALLEST_MAX_DATAGRAM_SIZE)
    )
    """The size of the UDP payload of sent packets. If you raise it, the path has to support larger packets."""
    qlog: Source | None = None
    """The directory for qlog files. By default the environment variable MUXKIT_QLOGDIR, if it is set."""

    @property
    def most_streams(self) -> int:
        """The number of the peer's streams that may be open simultaneously."""
        channels = self.limits.at_price(2 * STREAM_PRICE).channels
        return 2 * channels + 256 if self.streams is None else self.streams

    def configuration(self, *, is_client: bool) -> QuicConfiguration:
        """Return aioquic's configuration for one side. Raises ValueError if `alpn` is empty."""
        if not self.alpn:
            raise ValueError("alpn=(): both sides have to agree on a protocol")
        limits = self.limits
        directory = self.qlog or os.environ.get(QLOG_DIRECTORY)
        return QuicConfiguration(
            is_client=is_client,
            alpn_protocols=list(self.alpn),
            idle_timeout=self.idle_timeout,
            max_data=limits.connection_bytes,
            max_stream_data=min(limits.channel_first, limits.channel_bytes, limits.connection_bytes),
            max_datagram_size=self.packet_size,
            max_datagram_frame_size=DATAGRAM_MOST,
            cipher_suites=CIPHERS,
            congestion_control_algorithm=congestion.NAME,
            quic_logger=DirectoryLogger(Path(directory)) if directory else None,
        )


def trust(configuration: QuicConfiguration, *, ca: Source | bytes | None, name: str, insecure: bool) -> None:
    """Set the authorities that a client trusts: the system's, or those in `ca`, which is a file or PEM data."""
    configuration.server_name = name
    configuration.verify_mode = ssl.CERT_NONE if insecure else ssl.CERT_REQUIRED
    if isinstance(ca, bytes):
        configuration.load_verify_locations(cadata=ca)
    elif ca is not None:
        _check_readable("ca", ca)
        configuration.load_verify_locations(cafile=os.fspath(ca))
    else:
        system = ssl.get_default_verify_paths()
        configuration.load_verify_locations(cafile=system.cafile, capath=system.capath)


def identify(
    configuration: QuicConfiguration, *, certificate: Source, key: Source | None, password: str | None
) -> None:
    """Set the certificate that one side presents: a PEM file with the chain, and its key.

    Raises:
        ValueError: if a file can't be read or doesn't contain them.
    """
    _check_readable("certificate", certificate)
    if key is not None:
        _check_readable("key", key)
    try:
        configuration.load_cert_chain(certificate, key or certificate, password)
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"certificate={os.fspath(certificate)!r}: no chain with its key in PEM ({error})") from error


def trust_clients(configuration: QuicConfiguration, tls: TLS) -> None:
    """Set the authorities of client certificates. If `tls` has none, clients aren't asked for a certificate."""
    if tls.client_ca is not None:
        configuration.verify_mode = ssl.CERT_REQUIRED
        configuration.load_verify_locations(
            cadata=tls.client_ca if isinstance(tls.client_ca, bytes) else Path(tls.client_ca).read_bytes()
        )


class Renewed:
    """Returns the configuration of a server's next connection. It makes a new one after `tls` was reloaded."""

    def __init__(self, tls: TLS, make: Callable[[], QuicConfiguration]) -> None:
        self._tls = tls
        self._make = make
        self._generation = tls.generation
        self._made = make()

    def __call__(self) -> QuicConfiguration:
        if self._generation != self._tls.generation:
            self._generation = self._tls.generation
            try:
                self._made = self._make()
            except (OSError, ValueError) as error:  # the files have changed again, and are unusable
                # log: The certificate files have changed and can't be used.
                log.error("quic goes on with the certificates that it had: %s", error)
        return self._made


def _check_readable(what: str, path: Source) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"{what}={os.fspath(path)!r}: {os.strerror(error.errno or 0)}") from error


class Tickets:
    """Session tickets that a client received from servers. They shorten its next handshakes. Early data isn't used."""

    def __init__(self, most: int = TICKETS_MOST) -> None:
        self._most = most
        self._tickets: OrderedDict[str, SessionTicket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def keep(self, ticket: SessionTicket) -> None:
        """Store a ticket. Only the newest ticket of each server is kept."""
        ticket.max_early_data_size = None
        self._tickets[ticket.server_name] = ticket
        self._tickets.move_to_end(ticket.server_name)
        if len(self._tickets) > self._most:
            self._tickets.popitem(last=False)

    def take(self, name: str) -> SessionTicket | None:
        """Return and remove the ticket of a server, which can be used once, or return None."""
        return self._tickets.pop(name, None)


class IssuedTickets:
    """Session tickets that a server issued. Each can be used once. Above the limit, the oldest are dropped."""

    def __init__(self, most: int = TICKETS_MOST) -> None:
        self._most = most
        self._tickets: OrderedDict[bytes, SessionTicket] = OrderedDict()

    def keep(self, ticket: SessionTicket) -> None:
        """Store a ticket, and drop the oldest one above the limit."""
        self._tickets[ticket.ticket] = ticket
        if len(self._tickets) > self._most:
            self._tickets.popitem(last=False)

    def take(self, ticket: bytes) -> SessionTicket | None:
        """Return and remove a ticket, or return None if it is unknown or was used."""
        return self._tickets.pop(ticket, None)
