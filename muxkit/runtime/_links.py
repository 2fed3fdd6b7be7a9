"""The kinds of link that carry a connection, and what transports and protocols offer to `muxkit.connect`."""

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
"""One of three: an ordered byte stream, packets that may be lost, streams and datagrams side by side."""

ByteLink = trio.abc.Stream

PacketLink = trio.abc.Channel[bytes]
"""Packets with one peer, each of which may be lost, repeated or late; `trio.DTLSChannel` is one."""


@runtime_checkable
class NowaitLink(Protocol, metaclass=QuickCheck):
    """A byte stream that can also write at once, without a checkpoint.

    The pump uses it when nothing is queued, and hands what the kernel did not take to its writer. It is never
    called while `send_all` runs.
    """

    def send_nowait(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Write what fits now, in order; return the number of bytes taken (0 when the kernel is full).

        The next write begins with what was not taken: a link that encrypts may have it on its way already. Raises
        `trio.BrokenResourceError` when the connection is gone, `trio.ClosedResourceError` when it was closed on our
        side.
        """

    async def send_buffers(self, buffers: Sequence[bytes | memoryview]) -> None:
        """`send_all` for several buffers, without joining them first."""


@runtime_checkable
class WaitableLink(Protocol, metaclass=QuickCheck):
    """A byte stream on which a task can wait for bytes before it takes them.

    A receiver that waits for a message can then read in the place of the pump's own task, and has the message one
    task switch earlier. `receive_some` is not called beside it.
    """

    async def wait_readable(self) -> None:
        """Sleep until there may be something to receive: bytes, the end or an error.

        Always a checkpoint, also when something is there. `receive_nowait` reports a connection that is gone or closed.
        """

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        """Return what has come, b"" at the end of the stream, None while there is nothing.

        Raises `trio.BrokenResourceError` when the connection is gone, `trio.ClosedResourceError` when it was
        closed on our side.
        """

    def stop_waiting(self) -> None:
        """Let `wait_readable` return now; harmless when no task waits."""


@runtime_checkable
class Described(Protocol, metaclass=QuickCheck):
    """A link that can name its ends; the text goes into errors and `session.info`."""

    @property
    def peer(self) -> str:
        """The other end, as text: `tcp 127.0.0.1:7000`."""


@runtime_checkable
class Explaining(Protocol, metaclass=QuickCheck):
    """A link whose end can carry a reason, as the close frame of a WebSocket does.

    `peer_reason` may also be had without `close_with`, by a link that can only read reasons.
    """

    @property
    def peer_reason(self) -> Reason | None:
        """Why the peer ended the link; None before that, or if it did not say."""

    async def close_with(self, reason: Reason) -> None:
        """Close, and tell the peer why."""


@runtime_checkable
class Parting(Protocol, metaclass=QuickCheck):
    """A byte stream that has no half-open state, and yet can end so that what was sent last arrives."""

    async def part(self) -> None:
        """Say that nothing more follows, then read on until the peer has closed; the caller bounds the time.

        It is the last call before the stream is closed. Raises `trio.BrokenResourceError` if the connection is gone.
        """


def may_answer_after_end(link: object) -> bool:
    """Return True if the peer may still read after it has ended its own direction of this byte stream.

    That holds for links with half-close. A link without it may say so in an attribute `may_answer_after_end`, as TLS
    does, where close_notify ends one direction. A WebSocket has no such state: nobody reads after a close frame.
    """
    return isinstance(link, trio.abc.HalfCloseableStream) or bool(getattr(link, "may_answer_after_end", False))


def peer_of(link: object) -> str:
    """Return the name of a link's other end, "" if it has none."""
    return link.peer if isinstance(link, Described) else ""


@runtime_checkable
class NowaitPackets(Protocol, metaclass=QuickCheck):
    """A packet link that knows its largest packet, and can send and receive several at once without a checkpoint.

    A pump uses it to move a burst with few system calls. Neither call may be made while the link's own `send` or
    `receive` runs in the same direction.
    """

    @property
    def packet_limit(self) -> int:
        """The largest packet that can be sent now, in bytes; it may change with the path."""

    def send_nowait(self, packets: Sequence[bytes]) -> int:
        """Send what the kernel takes now, in order; return the number of packets taken.

        Raises `trio.BrokenResourceError` when the link is gone, `trio.ClosedResourceError` when it was closed on
        our side, ValueError for a packet above `packet_limit`.
        """

    def receive_nowait(self, limit: int) -> list[bytes]:
        """Return what has come already, at most `limit` packets; an empty list if nothing has."""


@attrs.define
class StreamData:
    """The next bytes of a stream that the peer writes."""

    stream: StreamId
    data: bytes
    is_last: bool


@attrs.define
class StreamReset:
    """The peer gave up a stream that it writes."""

    stream: StreamId


@attrs.define
class StreamStopped:
    """The peer wants no more of a stream that we write."""

    stream: StreamId


@attrs.define
class Datagram:
    """One packet beside the streams; others may have been lost."""

    data: bytes


Arrival = StreamData | StreamReset | StreamStopped | Datagram


class MultistreamLink(trio.abc.AsyncResource):
    """Unidirectional streams and datagrams with one peer: QUIC.

    Streams are numbered as QUIC numbers unidirectional ones (2, 6, 10, … of a client, 3, 7, 11, … of a server). The
    peer may send on each stream what was granted; a grant follows `consumed`, never arrival. Writing never waits:
    `room` says how much a stream takes now, and `wait_writable` sleeps until some stream has more. What was written
    goes out by itself, one packet train for all that was written without a checkpoint in between.
    """

    @property
    @abstractmethod
    def role(self) -> Literal["client", "server"]:
        """Which side of the connection this is; it decides who numbers which streams."""

    @property
    @abstractmethod
    def peer(self) -> str:
        """The other end, as text: `quic 127.0.0.1:7000`."""

    @property
    @abstractmethod
    def round_trip(self) -> float | None:
        """Seconds, smoothed; None before the first measurement."""

    @abstractmethod
    async def receive(self) -> Sequence[Arrival]:
        """Wait for at least one arrival, then return all there are; an empty sequence is the orderly end.

        Raises `trio.BrokenResourceError` when the connection is lost or was closed with an error, and
        `trio.ClosedResourceError` when it was closed on our side.
        """

    @abstractmethod
    def may_open(self) -> bool:
        """Return True if the peer would take one more stream of ours now."""

    @abstractmethod
    def open(self) -> StreamId:
        """Open the next stream of ours; only when `may_open()`."""

    @abstractmethod
    def room(self, stream: StreamId) -> int:
        """Return how many bytes `write` takes on it now: the peer's credit and our high-water mark together."""

    @abstractmethod
    def write(self, stream: StreamId, data: bytes, is_last: bool) -> None:
        """Queue at most `room(stream)` bytes; the first write of a stream opens it for the peer."""

    @abstractmethod
    async def wait_writable(self) -> Sequence[StreamId]:
        """Sleep until streams that had no room have some, or a stream may be opened; return the former.

        They come in the order in which they were found without `room`. One task at a time. Raises as `receive` does.
        """

    @abstractmethod
    def reset(self, stream: StreamId) -> None:
        """Give up a stream that we write."""

    @abstractmethod
    def stop(self, stream: StreamId) -> None:
        """Ask the peer to give up a stream that it writes."""

    @abstractmethod
    def consumed(self, stream: StreamId, amount: int) -> None:
        """Renew so many bytes of credit for a stream that the peer writes: they were consumed."""

    def credit(self, stream: StreamId) -> int:
        """Return how many bytes the peer may still send on a stream, beyond those that `receive` has returned.

        A link that doesn't know returns 0, and then lends more than is lacking.
        """
        return 0

    @abstractmethod
    def lend(self, stream: StreamId, amount: int) -> None:
        """Let the peer send so many bytes beyond the window; what is consumed of the stream repays them first."""

    @property
    @abstractmethod
    def datagram_limit(self) -> int:
        """The largest datagram that can be sent now, in bytes; 0 if the peer takes none."""

    @abstractmethod
    def send_datagram(self, data: bytes) -> bool:
        """Queue one datagram of at most `datagram_limit` bytes; False if the queue is full, and then it is not sent."""

    def may_send_datagram(self) -> bool:
        """Return True if the queue of datagrams has room for one more; `wait_writable` wakes when that becomes so."""
        return True

    async def wait_delivered(self) -> None:
        """Sleep until the peer has confirmed all that was written; a link that cannot know returns when it is sent.

        Raises as `receive` does.
        """
        await trio.lowlevel.checkpoint()

    @abstractmethod
    def close(self, *, error: str = "", code: int | None = None) -> None:
        """Close now: orderly, or with `error` and `code` as the reason. `aclose` waits until it has been sent."""


Link = ByteLink | PacketLink | MultistreamLink


class Transport(Protocol):
    """What an adapter offers to `muxkit.connect` and `muxkit.serve`, as an entry point of `muxkit.transports`.

    An address is what stands behind `://` in a URL. Options are the adapter's own keywords, which each adapter types.
    A method would have to name them all, so the shapes stand here as attributes:

        link: LinkKind  # what its connections are; "stream" if it has no such attribute
        def connect(self, address: str, **options) -> AbstractAsyncContextManager[Link]
            # and of "multistream" links: limits: Limits
        async def serve(self, handler: Callable[[Link], Awaitable[None]], address: str, *,
                        limits: Limits, task_status: trio.TaskStatus[list[str]], **options) -> None

    A transport with connections of several kinds has a method `for_links(links: frozenset[LinkKind]) -> Transport`,
    which returns the one for a protocol that speaks over these kinds.

    `connect` opens one connection, closed with its block. `serve` listens until it is cancelled, and starts with
    the addresses that clients can use.
    """

    @property
    def connect(self) -> Callable[..., AbstractAsyncContextManager[Any]]: ...

    @property
    def serve(self) -> Callable[..., Awaitable[None]]: ...


@attrs.frozen
class Candidate:
    """One of the addresses that the address of a URL stands for."""

    address: str
    """An address for `Transport.connect`."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options for `Transport.connect` that the caller hasn't given, such as the name in the certificate."""


@runtime_checkable
class Choosing(Protocol, metaclass=QuickCheck):
    """A transport of clients whose address may stand for several, which `muxkit.connect` then races.

    A byte stream over TCP needs this only for SRV records, because TCP itself can race the addresses of a name: whoever
    completes the handshake is there. With UDP only the protocol above it notices whether anybody answers.
    """

    async def candidates(
        self, address: str, *, protocol: str, options: Mapping[str, Any]
    ) -> Sequence[Sequence[Candidate]]:
        """Look the address up, and return the candidates as `first_of` takes them: by priority, preferred ones first.

        Raises OSError if there are none, ValueError for an address of another form.
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
    """What a protocol offers to `muxkit.connect` and `muxkit.serve`, as an entry point of `muxkit.protocols`.

    It may have `links: frozenset[LinkKind]`, the kinds of link that it speaks over; `{"stream"}` if it has not. And
    if its sessions outlive their connections, it is a `ResumingPlugin` too.
    """

    options: frozenset[str]
    """The keyword options that are the protocol's; all others go to the transport."""

    def session(
        self,
        link: Any,  # noqa: ANN401 - of one of the kinds in `links`, and each plugin names its own
        /,
        *,
        role: Literal["client", "server"],
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        **options: Any,
    ) -> AbstractAsyncContextManager[Session]:
        """Run a session over a new connection, which it closes at its end."""


class Listening(Protocol):
    """What a server does with the connections that its transport accepts."""

    @property
    def sessions(self) -> Collection[Session]:
        """The sessions whose handlers run now."""

    async def handle(self, link: Any, /, *, refused: Refused | None = None) -> None:  # noqa: ANN401 - as in `ProtocolPlugin.session`
        """Serve one connection until it ends; one that is `refused` is only told why."""

    async def shutdown(self, *, grace: float, redirect: Reason | None = None) -> None:
        """Accept no new sessions and channels, and wait up to `grace` seconds for the live ones to end.

        With `redirect`, each session ends with this reason, and clients that connect meanwhile receive it too.
        """


@runtime_checkable
class ResumingPlugin(Protocol, metaclass=QuickCheck):
    """A protocol whose sessions outlive their connections, and which therefore dials by itself."""

    def split(self, transport: str, address: str) -> tuple[str, str | None]:
        """Split an address into what the transport needs and the name of the service, if it has one."""

    def join(self, transport: str, address: str, endpoint: str | None) -> str:
        """Put an address together again."""

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
        """Run one session over as many connections as it takes."""

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
        """Listen: find the session of each connection, and call `handler` with each new session."""


class OneAtATime:
    """Raises BusyResourceError when a second task makes the same call of a link; calls are never queued."""

    __slots__ = ("_what", "is_busy")

    def __init__(self, what: str) -> None:
        self._what = what
        self.is_busy: bool = False

    def check(self) -> None:
        """Raise if a task is inside; for calls that do not wait."""
        if self.is_busy:
            raise trio.BusyResourceError(f"another task is already {self._what}")

    def begin(self) -> None:
        """Enter without a `with` block, which costs two more calls; the caller resets `is_busy`."""
        self.check()
        self.is_busy = True

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *details: object) -> None:
        self.is_busy = False
