"""The interfaces between muxkit, its transports and its protocols.

`muxkit.connect("bpmux+tls://host:7000")` combines a *transport* (`tls`) with a *protocol* (`bpmux`). The transport
opens a *link*, which carries bytes or packets to one peer. The protocol runs a session over the link. Neither imports
the other: both are entry points, and this module defines what each must provide.

- `ByteLink`, `PacketLink` and `MultistreamLink` are the kinds of link: an ordered byte stream, packets that may be
  lost, and QUIC's streams and datagrams.
- `NowaitLink`, `WaitableLink`, `ClosingNowait`, `NowaitPackets`, `Described`, `Explaining` and `Parting` are optional
  abilities of a link. The *pump*, which moves bytes between a link and a protocol's engine, looks for each of them with
  `isinstance`, and works without it too. A transport implements an ability by having its methods, and doesn't have to
  import it.
- `Transport` and `Choosing` are the interface of a transport; `ProtocolPlugin` and `ResumingPlugin` that of a protocol.
- `Listening` serves the connections that a server's transport accepts.
- `check_options` and `OneAtATime` are helpers for the authors of transports.

Unless a method says otherwise, all links follow Trio's rules for streams. Only one task at a time may send, and only
one may receive. `trio.BrokenResourceError` means that the connection was lost, and `trio.ClosedResourceError` that this
side has closed it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from difflib import get_close_matches
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import trio

from muxkit._errors import Refused
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import QuickCheck, Reason, StreamId
from muxkit.runtime._session import Session

LinkKind = Literal["stream", "packets", "multistream"]
"""The kind of a link: a `ByteLink`, a `PacketLink` or a `MultistreamLink`."""

ByteLink = trio.abc.Stream
"""An ordered, reliable byte stream, such as `trio.SocketStream`."""

PacketLink = trio.abc.Channel[bytes]
"""Packets to and from one peer. Each may be lost, duplicated or delayed. `trio.DTLSChannel` is an example."""


@runtime_checkable
class NowaitLink(Protocol, metaclass=QuickCheck):
    """A byte stream that can write without waiting.

    A pump with nothing queued writes with `send_nowait` in the task that sends a message, which saves a switch to the
    writer task. The writer task later sends the bytes that the kernel didn't accept.
    """

    def send_nowait(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Write as many bytes as the kernel accepts now, in order, without a checkpoint.

        Must not be called while `send_all` or `send_buffers` runs. If not all bytes were accepted, the caller must
        begin its next write with the remaining ones, because an encrypting link may have encrypted them already.

        Returns:
            The number of bytes accepted, which is 0 if the kernel's buffer is full.

        Raises:
            trio.BrokenResourceError: If the connection was lost.
            trio.ClosedResourceError: If this side has closed the link.
        """

    async def send_buffers(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send several buffers as `send_all` would send their concatenation, without joining them first."""


@runtime_checkable
class WaitableLink(Protocol, metaclass=QuickCheck):
    """A byte stream that separates waiting for bytes from reading them.

    The pump needs this to let a task that is blocked in `receive()` read from the link itself, as the module
    `muxkit.runtime.pumps.reading` explains. That task then has its message one task switch earlier. `receive_some` is
    never called at the same time as these methods.
    """

    async def wait_readable(self) -> None:
        """Wait until `receive_nowait` may have something to return or raise. May return too early.

        This is a checkpoint, even if the stream is readable already.
        """

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        """Return up to `max_bytes` bytes that have arrived.

        Returns:
            The bytes, b"" at the end of the stream, or None if no bytes have arrived yet.

        Raises:
            trio.BrokenResourceError: If the connection was lost.
            trio.ClosedResourceError: If this side has closed the link.
        """

    def stop_waiting(self) -> None:
        """Make a pending `wait_readable` return now. Does nothing if no task is waiting."""


@runtime_checkable
class ClosingNowait(Protocol, metaclass=QuickCheck):
    """A link that can be closed without a checkpoint.

    `trio.aclose_forcefully` does the same for any link, but it takes a cancel scope and a pass of Trio's loop.
    """

    def close_nowait(self) -> None:
        """Close the link without waiting for the peer. Tasks that use the link raise `trio.ClosedResourceError`."""


@runtime_checkable
class Described(Protocol, metaclass=QuickCheck):
    """A link that knows the address of its peer."""

    @property
    def peer(self) -> str:
        """The peer's address for error messages and `session.info`, such as `tcp 127.0.0.1:7000`."""


@runtime_checkable
class Explaining(Protocol, metaclass=QuickCheck):
    """A link that can transmit a reason for closing it, as a WebSocket does in its close frame.

    A link that only receives reasons may have `peer_reason` without `close_with`.
    """

    @property
    def peer_reason(self) -> Reason | None:
        """The peer's reason for closing the link, or None if it gave none or hasn't closed the link."""

    async def close_with(self, reason: Reason) -> None:
        """Close the link like `aclose`, and send `reason` to the peer."""


@runtime_checkable
class Parting(Protocol, metaclass=QuickCheck):
    """A byte stream that can't be half-closed, but can be shut down without losing the last bytes sent.

    If a socket is closed while bytes from the peer are unread, TCP sends a reset, and the peer may discard bytes that
    it has already received. The pump avoids that with `send_eof` on a `trio.abc.HalfCloseableStream`, and with `part`
    on streams that have no `send_eof`, such as TLS.
    """

    async def part(self) -> None:
        """Notify the peer that no more bytes follow, then read and discard until the peer closes the stream.

        The caller must limit the time, and may only close the stream afterwards.

        Raises:
            trio.BrokenResourceError: If the connection was lost.
        """


def may_answer_after_end(link: object) -> bool:
    """Return True if the peer may still read after it has ended its own direction of this byte stream.

    The engine then still sends the answers that it hasn't sent yet. This is so for every stream with half-close. Other
    links can have a bool attribute `may_answer_after_end`: it is True for TLS 1.3, where close_notify ends one
    direction only. A WebSocket doesn't have it, because nobody reads after a close frame.
    """
    return isinstance(link, trio.abc.HalfCloseableStream) or bool(getattr(link, "may_answer_after_end", False))


def peer_of(link: object) -> str:
    """Return the address of a link's peer as text, or "" if the link doesn't know it."""
    return link.peer if isinstance(link, Described) else ""


@runtime_checkable
class NowaitPackets(Protocol, metaclass=QuickCheck):
    """A packet link that can send and receive several packets per call, without waiting.

    The pump uses this to move bursts of packets with few system calls. `send_nowait` must not be called while `send`
    runs, nor `receive_nowait` while `receive` runs.
    """

    @property
    def packet_limit(self) -> int:
        """The size of the largest packet that can be sent now, in bytes. It can change with the network path."""

    def send_nowait(self, packets: Sequence[bytes]) -> int:
        """Send as many packets as the kernel accepts now, in order.

        Returns:
            The number of packets accepted.

        Raises:
            trio.BrokenResourceError: If the link was lost.
            trio.ClosedResourceError: If this side has closed the link.
            ValueError: If a packet is larger than `packet_limit`.
        """

    def receive_nowait(self, limit: int) -> list[bytes]:
        """Return up to `limit` packets that have already arrived. The list is empty if there are none."""


@attrs.define
class StreamData:
    """The next bytes of a stream on which the peer sends."""

    stream: StreamId
    data: bytes
    is_last: bool


@attrs.define
class StreamReset:
    """The peer has reset a stream on which it sends (RESET_STREAM in QUIC)."""

    stream: StreamId


@attrs.define
class StreamStopped:
    """The peer won't read more from a stream on which we send (STOP_SENDING in QUIC)."""

    stream: StreamId


@attrs.define
class Datagram:
    """A datagram, which belongs to no stream. Datagrams can get lost."""

    data: bytes


Arrival = StreamData | StreamReset | StreamStopped | Datagram


class MultistreamLink(trio.abc.AsyncResource):
    """The unidirectional streams and the datagrams of one QUIC connection.

    Stream numbers are those of QUIC's unidirectional streams: 2, 6, 10, … if the client sends on the stream, and 3, 7,
    11, … if the server does.

    Flow control works as in QUIC. Each side may only send as many bytes on a stream as the other side has granted,
    which is its *credit*. This side grants more when the application has consumed bytes (`consumed`), not when they
    arrive.

    Writing never waits. `room` returns how many bytes a stream accepts now, and `wait_writable` waits until a stream
    accepts more. The link sends written bytes automatically, and combines the bytes of all writes without a checkpoint
    between them.
    """

    @property
    @abstractmethod
    def role(self) -> Literal["client", "server"]:
        """The side of the connection that this is."""

    @property
    @abstractmethod
    def peer(self) -> str:
        """The peer's address as text, such as `quic 127.0.0.1:7000`."""

    @property
    @abstractmethod
    def round_trip(self) -> float | None:
        """The smoothed round-trip time in seconds, or None before the first measurement."""

    @abstractmethod
    async def receive(self) -> Sequence[Arrival]:
        """Wait until something arrives, and return everything that has arrived.

        Returns:
            The arrivals in order, or an empty sequence if the peer has closed the connection without an error.

        Raises:
            trio.BrokenResourceError: If the connection was lost, or closed with an error.
            trio.ClosedResourceError: If this side has closed the link.
        """

    @abstractmethod
    def may_open(self) -> bool:
        """Return True if the peer allows this side to open one more stream now."""

    @abstractmethod
    def open(self) -> StreamId:
        """Open a stream and return its number. Call this only if `may_open()` is True."""

    @abstractmethod
    def room(self, stream: StreamId) -> int:
        """Return how many bytes `write` accepts now. Both the peer's credit and the link's buffer limit this number."""

    @abstractmethod
    def write(self, stream: StreamId, data: bytes, is_last: bool) -> None:
        """Queue at most `room(stream)` bytes. The peer learns of a stream from the first write."""

    @abstractmethod
    async def wait_writable(self) -> Sequence[StreamId]:
        """Wait until a stream for which `room` returned 0 has room again, or until another stream may be opened.

        Only one task may call this at a time. Raises the same errors as `receive`.

        Returns:
            The streams that have room again, in the order in which `room` first returned 0 for them. The sequence is
            empty if only a stream may be opened, or a datagram may be sent.
        """

    @abstractmethod
    def reset(self, stream: StreamId) -> None:
        """Abandon a stream on which this side sends. The peer gets a `StreamReset`."""

    @abstractmethod
    def stop(self, stream: StreamId) -> None:
        """Ask the peer to abandon a stream on which it sends. The peer gets a `StreamStopped`."""

    @abstractmethod
    def consumed(self, stream: StreamId, amount: int) -> None:
        """Grant `amount` bytes of new credit for a stream, because the application has consumed as many."""

    def credit(self, stream: StreamId) -> int:
        """Return how many bytes the peer may still send on a stream, in addition to those that `receive` has returned.

        A link that doesn't know this number returns 0. The pump then lends more credit than necessary.
        """
        return 0

    @abstractmethod
    def lend(self, stream: StreamId, amount: int) -> None:
        """Grant `amount` bytes of credit in advance, for a message that doesn't fit into the stream's window.

        The bytes that `consumed` reports next repay the loan first, and so grant no new credit.
        """

    @property
    @abstractmethod
    def datagram_limit(self) -> int:
        """The size of the largest datagram that can be sent now, in bytes. It is 0 if the peer accepts no datagrams."""

    @abstractmethod
    def send_datagram(self, data: bytes) -> bool:
        """Queue a datagram of at most `datagram_limit` bytes. If the queue is full, drop it and return False."""

    def may_send_datagram(self) -> bool:
        """Return True if the queue has room for a datagram. If it has none, `wait_writable` returns once it has."""
        return True

    async def wait_delivered(self) -> None:
        """Wait until the peer has acknowledged everything that was written.

        A link without acknowledgements returns when the data has been sent. Raises the same errors as `receive`.
        """
        await trio.lowlevel.checkpoint()

    @abstractmethod
    def close(self, *, error: str = "", code: int | None = None) -> None:
        """Close the connection without waiting. `aclose` also waits until the close frame has been sent.

        Args:
            error: The reason that the peer gets. "" closes without an error.
            code: The error code that the peer gets. By default it depends on `error`.
        """


Link = ByteLink | PacketLink | MultistreamLink


class Transport(Protocol):
    """A transport: it opens links and listens for them. Transports are entry points of the group `muxkit.transports`.

    A transport has these members. An address is the part of a URL after `://`. The options are keyword arguments that
    each transport defines, which is why this class can't declare `connect` and `serve` as methods:

        link: LinkKind  # the kind of its links; "stream" if the attribute is missing
        def connect(self, address: str, **options) -> AbstractAsyncContextManager[Link]
            # for "multistream" links with another keyword argument, limits: Limits
        async def serve(self, handler: Callable[[Link], Awaitable[None]], address: str, *,
                        limits: Limits, task_status: trio.TaskStatus[list[str]], **options) -> None

    `connect` opens a link and closes it when the block ends. `serve` runs `handler` for each link that it accepts,
    until it is cancelled. Once it listens, it calls `task_status.started` with the addresses that clients can use.

    A transport with links of several kinds has a method `for_links(links: frozenset[LinkKind]) -> Transport`. It
    returns the transport to use for a protocol that supports those kinds.
    """

    @property
    def connect(self) -> Callable[..., AbstractAsyncContextManager[Any]]: ...

    @property
    def serve(self) -> Callable[..., Awaitable[None]]: ...


@attrs.frozen
class Candidate:
    """One of the addresses to which a name in a URL resolves."""

    address: str
    """An address for `Transport.connect`."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Default options for `Transport.connect`, such as the expected name in the certificate."""


@runtime_checkable
class Choosing(Protocol, metaclass=QuickCheck):
    """A transport that resolves a name to several addresses, among which `muxkit.connect` uses the first that answers.

    A transport over TCP needs this only for SRV records. It can race the addresses of a host itself, since a completed
    TCP handshake proves that somebody answers. Over UDP, only the protocol notices if somebody does.
    """

    async def candidates(
        self, address: str, *, protocol: str, options: Mapping[str, Any]
    ) -> Sequence[Sequence[Candidate]]:
        """Resolve an address.

        Args:
            address: The part of the URL after `://`.
            protocol: The name of the protocol, which is part of the name of an SRV record.
            options: The options that the caller has given to the transport.

        Returns:
            Groups of candidates, the preferred group first. `muxkit.connect` tries the candidates of a group only after
            all candidates of the groups before it have failed.

        Raises:
            OSError: If the name has no addresses.
            ValueError: If the address is invalid.
        """


OF_ENCRYPTION = frozenset({"tls", "ssl_context", "certificate", "key", "ca", "client_ca"})


def check_options(
    kind: str, given: Iterable[str], known: Collection[str], *, elsewhere: Collection[str] = (), **also: Collection[str]
) -> None:
    """Raise TypeError for an unknown option. The error suggests the nearest name.

    Args:
        kind: The transport.
        given: The names of the options that it was given.
        known: The names of the options that it has.
        elsewhere: The names of options that other transports have. They aren't misspelt, so nothing is suggested.
        also: Options of others that the caller could have meant, by the name of whoever has them.
    """
    for name in given:
        if name in known:
            continue
        near = get_close_matches(name, [*known, *(each for names in also.values() for each in names)], 1)
        if name in OF_ENCRYPTION and OF_ENCRYPTION.isdisjoint(known):
            problem = f"{kind} has no option {name!r}, since it does not encrypt; tls, wss, quic and dtls do."
        elif near and name not in elsewhere:
            problem = f"unknown option {name!r}: did you mean {near[0]!r}?"
        else:
            problem = f"{kind} has no option {name!r}."
        lists = (f"of {whose}: {', '.join(sorted(names)) or 'none'}" for whose, names in [(kind, known), *also.items()])
        raise TypeError(f"{problem} Options {'; '.join(lists)}")


class ProtocolPlugin(Protocol):
    """A protocol, which runs sessions over links. Protocols are entry points of the group `muxkit.protocols`.

    A protocol may have an attribute `links: frozenset[LinkKind]`, the kinds of link that it supports. The default is
    `{"stream"}`. A protocol whose sessions can outlive a connection also implements `ResumingPlugin`.
    """

    options: frozenset[str]
    """The names of the protocol's own keyword options. `muxkit.connect` passes all other options to the transport."""

    def session(
        self,
        link: Any,  # noqa: ANN401 - each plugin declares the kinds of link that it supports
        /,
        *,
        role: Literal["client", "server"],
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        **options: Any,
    ) -> AbstractAsyncContextManager[Session]:
        """Run a session over a new link while the returned block runs, and close the link when the block ends."""


class Listening(Protocol):
    """A server's side of a protocol: it serves the links that the server's transport accepts."""

    @property
    def sessions(self) -> Collection[Session]:
        """The sessions whose handlers are running."""

    async def handle(self, link: Any, /, *, refused: Refused | None = None) -> None:  # noqa: ANN401 - as in `ProtocolPlugin.session`
        """Serve one link until it ends. If `refused` is given, only send the peer that reason and close the link."""

    async def shutdown(self, *, grace: float, redirect: Reason | None = None) -> None:
        """Accept no new sessions and channels, and wait up to `grace` seconds for the live ones to end.

        With `redirect`, each session ends with this reason, and clients that connect meanwhile receive it too.
        """


@runtime_checkable
class ResumingPlugin(Protocol, metaclass=QuickCheck):
    """A protocol whose sessions can outlive a connection, and which therefore opens its connections itself."""

    def split(self, transport: str, address: str) -> tuple[str, str | None]:
        """Split an address into the transport's part, and the name of the service or None if it contains none."""

    def join(self, transport: str, address: str, endpoint: str | None) -> str:
        """Combine a transport's address and the name of a service into one address. This is the inverse of `split`."""

    def link(
        self,
        dial: Callable[[], AbstractAsyncContextManager[Any]],
        *,
        endpoint: str | None,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        **options: Any,
    ) -> AbstractAsyncContextManager[Session]:
        """Run one session while the returned block runs. Call `dial` for each connection that the session needs."""

    def listener(
        self,
        handler: Callable[[Any], Awaitable[object]],
        *,
        endpoint: str | None,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        **options: Any,
    ) -> AbstractAsyncContextManager[Listening]:
        """Serve connections while the returned block runs.

        The listener assigns each accepted connection to its session, and calls `handler` with each new session.
        """


class OneAtATime:
    """Detects that two tasks use a link in the same direction at the same time, which is a bug in the program.

    Use an instance as a `with` block around the body of a method. If another task is inside the block, entering it
    raises `trio.BusyResourceError`, as Trio's own streams do. `what` completes the text "another task is already …".
    """

    __slots__ = ("_what", "is_busy")

    def __init__(self, what: str) -> None:
        self._what = what
        self.is_busy: bool = False

    def check(self) -> None:
        """Raise `trio.BusyResourceError` if a task is inside the block. For methods that never wait."""
        if self.is_busy:
            raise trio.BusyResourceError(f"another task is already {self._what}")

    def begin(self) -> None:
        """Enter like the `with` block, but without its cost of two more calls. The caller must reset `is_busy`."""
        self.check()
        self.is_busy = True

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *details: object) -> None:
        self.is_busy = False
