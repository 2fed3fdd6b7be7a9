"""The options of clients and servers, each declared once.

`muxkit.connect`, `open_server` and every other call that opens sessions take their options as keyword arguments, and
these typed dictionaries say which ones there are. A signature such as

    def connect(url: str | Sequence[str], **options: Unpack[ConnectOptions]) -> ...

lets editors complete the options and lets type checkers report a misspelt one. At run time, `check_link_options` raises
an error with the nearest name.

The dictionaries contain the options of all sessions and of all transports that come with muxkit. They don't contain
the options of one protocol, except `config`, whose type is the protocol's business. A protocol extends the dictionaries
with its own options and uses them for its own `connect`, `open_server` and `reconnecting`. A package with a protocol or
a transport of its own does the same:

    class ConnectOptions(muxkit.ConnectOptions, total=False):
        speed: int

    def connect(url: str, **options: Unpack[ConnectOptions]) -> AbstractAsyncContextManager[muxkit.Session]:
        known: muxkit.ConnectOptions = options  # `muxkit.connect` passes `speed` on, too
        return muxkit.connect(url, **known)

The decision record 30 explains why. Types that need an extra are imported for type checkers only, and types of muxkit's
transports aren't imported at all, because transports are loaded by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from muxkit.runtime import check_options

if TYPE_CHECKING:
    import os
    import socket
    import ssl

    import dns.asyncresolver
    from OpenSSL import SSL

    # In `typing` from Python 3.13 on. Type checkers know this module even if it isn't installed.
    from typing_extensions import ReadOnly

    from muxkit._authorize import Authorize
    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit._tls import TLS
    from muxkit.runtime import Backoff, OnFailed
    from muxkit_web import Pages

Side = Literal["client", "server"]


class SessionOptions(TypedDict, total=False):
    """Options of every session, on both sides."""

    limits: Limits | None
    """What the peer can make this side store or do."""
    observer: Observer | None
    """Receives notifications about sessions."""
    linger: float
    """How many seconds leaving the block may take: 5 by default."""
    config: ReadOnly[object]
    """The settings of the protocol, such as `bpmux.Config(...)`. Other packages' protocols take theirs here."""


class TransportOptions(TypedDict, total=False):
    """Options of transports, on both sides."""

    tls: TLS | None
    """Certificates and trust settings. A server needs `cert` and `key`, and with `client_ca` it accepts only clients
    with a certificate from that authority. By default, a client trusts the authorities of the system."""
    ssl_context: ssl.SSLContext | SSL.Context | None
    """A context to use instead of `tls`: an `ssl.SSLContext`, or for dtls one of `dtls.client_context` or
    `dtls.server_context`."""
    alpn: Sequence[str]
    """Protocol names to agree on. A peer that agrees to none is refused."""
    offers: Sequence[str]
    """Protocol names to agree on that the peer doesn't have to know. By default, bpmux offers its own."""
    insecure: bool
    """Allows plaintext beyond loopback, or a client whose context doesn't verify the server."""
    unsent: int
    """Bytes that the kernel may hold unsent: 128 KiB by default. A small value keeps channels fair."""
    subprotocols: Sequence[str]
    """Names of WebSocket subprotocols, in order of preference. A client refuses a server that selects none."""
    message_most: int
    """Bytes of the largest WebSocket message to accept: 256 KiB by default."""
    close_timeout: float
    """Seconds for taking leave of a peer that doesn't answer: 5 by default."""
    largest: int
    """Bytes of the largest packet to send: 1,232 by default."""
    receive_buffer: int
    """Bytes of the receive buffer requested from the kernel: 4 MiB by default."""
    send_buffer: int
    """Bytes of the send buffer requested from the kernel: 1 MiB by default."""
    refusals: int | None
    """Reports in a row that the peer is unreachable, after which it counts as lost: 8 by default. None ignores them."""
    retransmit: float
    """Seconds until a lost packet of the handshake is sent again: 1 by default."""
    streams: int | None
    """The number of the peer's streams that may be open simultaneously. The default follows from `limits`."""
    idle_timeout: float
    """Seconds of silence after which the peer counts as lost: 30 by default."""
    keep_alive: float | None
    """Seconds of silence before a ping: 10 by default. None turns pings off."""
    packet_size: int
    """Bytes of the UDP payload of sent packets: 1,200 by default. The path has to support a larger value."""
    qlog: str | os.PathLike[str] | None
    """The directory for qlog files. By default the environment variable MUXKIT_QLOGDIR, if it is set."""


class DialOptions(TransportOptions, total=False):
    """Options of the transports of clients."""

    connect_timeout: float
    """Seconds to connect, for each host: 30 by default. With quic and dtls, another name for `handshake_timeout`."""
    handshake_timeout: float
    """Seconds for the handshake of TLS or for the upgrade to a WebSocket: 30 by default."""
    server_hostname: str | None
    """The name in the server's certificate, if it isn't the host of the URL."""
    ca: str | os.PathLike[str] | bytes | None
    """Certificates to trust instead of the system's, as a PEM file or as PEM data. An alternative to `tls`."""
    proxy: str | None
    """The URL of a proxy to connect through, or `"environment"`."""
    headers: ReadOnly[Mapping[str, str] | Sequence[tuple[str, str]] | Sequence[tuple[bytes, bytes]]]
    """Headers of the HTTP request, as a mapping or as pairs of strings. With Aqueduct, pairs of bytes that describe
    this side to the peer."""
    resolver: dns.asyncresolver.Resolver | None
    """A resolver to use for SRV records instead of the system's settings."""
    capacity: int
    """Bytes under way in each direction: 64 KiB by default."""
    tickets: object
    """A store for session tickets, which shorten later handshakes with the same servers: a `quic.Tickets()`."""


class ListenOptions(TransportOptions, total=False):
    """Options of the transports of servers."""

    listeners: Sequence[socket.socket]
    """Listening sockets that were bound elsewhere, for example by a service manager. The server uses them instead of
    binding the addresses of the URLs."""
    balancers: Collection[str]
    """Addresses and networks of load balancers, whose PROXY headers are trusted."""
    origins: Collection[str]
    """Origins of web pages that may connect. Others get the status 403."""
    pages: Pages | None
    """Static files to deliver on the same port: a `muxkit_web.Pages(folder)`."""
    certificate: str | os.PathLike[str] | None
    """A PEM file with the server's certificate chain. An alternative to `tls`."""
    key: str | os.PathLike[str] | None
    """The file with the key of `certificate`, if it isn't in the same file."""
    password: str | None
    """The password of `key`."""
    retry: bool
    """Whether clients have to prove their addresses before the server stores anything for them: True by default."""
    tickets: bool
    """Whether to issue session tickets, which shorten the next handshakes of clients: False by default."""
    validation: Literal["answer", "told"]
    """What proves the address of a peer: a packet that answers one (`"answer"`, the default), or only a call of
    `PeerLink.validate` (`"told"`)."""
    idle: float
    """Seconds of silence after which a peer is forgotten: 60 by default."""
    counters: object
    """Counters to update while the server runs: a `udp.ServerCounters()`."""


class ConnectOptions(SessionOptions, DialOptions, total=False):
    """Options of a client, for `muxkit.connect`.

    With several URLs, each option applies to those whose protocol or transport has it.
    """

    token: str | None
    """Sent to the server's `authorize`."""
    stagger: float
    """Seconds between the starts of two attempts, if there are several URLs: 0.25 by default."""


class ReconnectOptions(ConnectOptions, total=False):
    """Options of a client that connects again and again, for `muxkit.reconnecting`."""

    backoff: Backoff | None
    """The pauses after failed attempts."""
    patience: float | None
    """Gives up after that many seconds without a session. None, the default, never gives up."""
    on_failed: OnFailed | None
    """Called with each failure and the seconds until the next attempt, instead of logging warnings."""
    redirects: Collection[str]
    """Hosts to which a server may send this client by `Server.shutdown(redirect=...)`, such as `["*.example.org"]`;
    `["*"]` allows all. The hosts of the URLs are always allowed. A redirect to another protocol or transport is never
    followed."""


class ServeOptions(SessionOptions, ListenOptions, total=False):
    """Options of a server, for `muxkit.open_server`, `serve` and `run_server`.

    With several URLs, `tls` applies to those whose transport encrypts.
    """

    authorize: Authorize | None
    """Decides who may connect. It is called with the `SessionInfo` of each connection and the token that the client
    sent, and returns the name of the user or raises `Refused`. `tokens` makes such a function."""


_OF_ALL: Final = SessionOptions.__annotations__.keys() - {"config"}
OF_SESSIONS: Final[Mapping[Side, frozenset[str]]] = {
    "client": frozenset({*_OF_ALL, "stagger", "tls", "token"}),
    "server": frozenset({*_OF_ALL, "authorize", "listeners", "tls"}),
}
"""The options that `connect` and `open_server` handle themselves, whatever the protocol and the transport are."""

OF_RECONNECTING: Final = frozenset(ReconnectOptions.__annotations__.keys() - ConnectOptions.__annotations__.keys())
"""The options that `reconnecting` handles itself."""

_DECLARED: Final = frozenset({*ReconnectOptions.__annotations__, *ServeOptions.__annotations__})
_NOT_OPTIONS: Final = frozenset({"address", "limits", "task_status"})  # parameters of transports, passed separately


def options_of(transport: object, side: Side) -> frozenset[str] | None:
    """Return the names of the options that one side of a transport accepts, None if it accepts any.

    muxkit's own transports declare their options. Those of a third-party transport are the parameters of its `connect`
    and `serve`.
    """
    declare: Callable[[Side], frozenset[str]] | None = getattr(transport, "options", None)
    if declare is not None:
        return declare(side)
    function: Callable[..., object] = getattr(transport, "connect" if side == "client" else "serve")
    try:
        _, *parameters = signature(function).parameters.values()
    except ValueError:  # a function in C without a signature
        return None
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters) - _NOT_OPTIONS


def check_link_options(
    name: str, transport: object, side: Side, options: Iterable[str], **also: Collection[str]
) -> None:
    """Raise TypeError for an option that a transport doesn't have. `also` are options that the caller has, by owner."""
    known = options_of(transport, side)
    if known is not None:
        check_options(name, options, known, elsewhere=_DECLARED, **also)
