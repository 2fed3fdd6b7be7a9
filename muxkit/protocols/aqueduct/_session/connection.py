"""Aqueduct connections for applications, their common channels, and the plugin for `muxkit.connect` and `muxkit.serve`.

The common two-way channels of `muxkit.Session` are made of Aqueduct's own: the client's first message on the entrypoint
carries the sender of a channel on which the server opens its channels. Every further message on either of the two opens
one: it carries a receiver and a sender.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, Literal, overload

import trio

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, measured
from muxkit._typed import Connect, OpenServer, Reconnecting
from muxkit.codecs import Codec, announced
from muxkit.core import Headers as ChannelHeaders
from muxkit.core import (
    Reason,
    Receiving,
    Sending,
    StartPace,
    counted,
    decode_name,
    encode_headers,
    encode_name,
    headers_refusal,
)
from muxkit.protocols.aqueduct._session.core import BROKEN_OFF, Channel, Core, Receiver, Sender, closed, refused
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.engine.events import Arrived
from muxkit.protocols.aqueduct.engine.halves import Outcome, Ticket
from muxkit.protocols.aqueduct.frames import Headers, Pairs, Role
from muxkit.runtime import (
    Backlog,
    ChannelOpening,
    ErrorMaker,
    LinkKind,
    MultistreamLink,
    SessionInfo,
    SessionStats,
    TypedChannel,
    Unclaimed,
    Unsupported,
    ValueT,
    background,
    protect_package,
    protected_manager,
    reason_for_leaving,
    typed,
)
from muxkit.runtime import Session as CommonSession
from muxkit.trace import traced

Side = Literal["client", "server"]


CLOSE_TIMEOUT = 5.0  # s
CLIENT_MARKER: Final = b"muxkit channels"  # the payload of the client's first message
OPENING_SIZE: Final = 64  # bytes, what a message that opens a channel counts, beside its name and payload
NAME: Final = b"name"  # the header of a message that opens a channel of that name
HEADERS: Final = b"muxkit.headers"  # the one that holds the headers of the channel
LEFT_BY_ERROR: Final = Reason("the other side left the connection by an error", 500)
CLOSING: Final = Reason("the connection is closing", 503)


@overload
def connection(
    link: trio.abc.Stream | MultistreamLink,
    *,
    role: Literal["client"] = ...,
    headers: Pairs = ...,
    config: Config | None = ...,
    limits: Limits | None = ...,
    observer: Observer | None = ...,
    linger: float = ...,
) -> AbstractAsyncContextManager[Client]: ...
@overload
def connection(
    link: trio.abc.Stream | MultistreamLink,
    *,
    role: Literal["server"],
    headers: Pairs = ...,
    config: Config | None = ...,
    limits: Limits | None = ...,
    observer: Observer | None = ...,
    linger: float = ...,
) -> AbstractAsyncContextManager[Server]: ...
def connection(
    link: trio.abc.Stream | MultistreamLink,
    *,
    role: Side = "client",
    headers: Pairs = (),
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = CLOSE_TIMEOUT,
) -> AbstractAsyncContextManager[Client | Server]:
    """Run a connection over QUIC or on a connected byte stream, which it owns from now on.

    `headers` are for the peer's `peer_headers`. Leaving the block normally finishes all senders, closes all receivers,
    waits until the peer has heard it and hangs up, all within `linger` seconds; if it cannot be known that the peer
    got everything, that raises `LinkLost`. Leaving by an error or a cancellation hangs up at once.
    """
    if isinstance(link, MultistreamLink) and link.role != role:
        raise ValueError(f"role={role!r} on the {link.role}'s end of a link")
    kind, side = (Client, Role.CLIENT) if role == "client" else (Server, Role.SERVER)
    observer = traced(observer, f"{role} aqueduct")
    make_core = partial(Core, link, side, headers=headers, config=config, limits=limits, observer=observer)
    return _run(kind, make_core, linger)


@protected_manager
async def _run(
    kind: type[Client | Server], make_core: Callable[[], Core], linger: float
) -> AsyncGenerator[Client | Server, None]:
    core = make_core()
    connection = core.session = kind(core)
    with measured(core.facts, connection):
        async with background() as nursery:
            nursery.start_soon(core.pump.run)
            connection._common.unclaimed.nursery = nursery
            try:
                yield connection
            except Exception as error:
                told = reason_for_leaving(error, LEFT_BY_ERROR)
                core.lose("the connection was left by an error", by="local", told=told)
                raise
            except BaseException:
                core.pump.lose("the connection was left by an error", by="local")
                raise
            await core.leave(linger)


class Connection(CommonSession):
    """One Aqueduct connection; made by `connection`, which gives a `Client` or a `Server`.

    It is a `muxkit.Session` as well: `open` and `incoming` carry two-way channels, on a connection whose entrypoint the
    application does not use.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._common = CommonChannels(core)

    # --- channels of Aqueduct

    @overload
    def channel(
        self, keep: Literal["receiver"] = ..., *, oneshot: bool = ..., headers: Pairs = ...
    ) -> tuple[Receiver, Ticket]: ...
    @overload
    def channel(
        self, keep: Literal["sender"], *, oneshot: bool = ..., headers: Pairs = ...
    ) -> tuple[Sender, Ticket]: ...
    def channel(
        self, keep: Literal["receiver", "sender"] = "receiver", *, oneshot: bool = False, headers: Pairs = ()
    ) -> tuple[Receiver | Sender, Ticket]:
        """Make a channel: the half to keep, and a ticket for the other one, to be sent with one message.

        The channel exists once that message is sent. `headers` go with it; a `oneshot` channel carries one message.
        """
        self._core.budget.owner.check()
        self._core.raise_if_lost()
        if keep == "sender":
            return self._core.new_sender(oneshot=oneshot, headers=headers)
        return self._core.new_receiver(oneshot=oneshot, headers=headers)

    async def peer_headers(self) -> Headers:
        """Wait for the headers that the peer gave to `connection`."""
        self._core.budget.owner.check()
        await trio.lowlevel.checkpoint()
        await self._core.connected.wait()
        if self._core.peer_headers is None:
            raise self._core.pump.loss()
        return self._core.peer_headers

    # --- the common session

    @overload
    def open(
        self, name: str = "", *, payload: bytes = b"", headers: ChannelHeaders | None = None
    ) -> ChannelOpening[Channel]: ...
    @overload
    def open(
        self, name: str = "", *, codec: Codec[ValueT], payload: bytes = b"", headers: ChannelHeaders | None = None
    ) -> ChannelOpening[TypedChannel[ValueT]]: ...
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT] | None = None,
        payload: bytes = b"",
        headers: ChannelHeaders | None = None,
    ) -> ChannelOpening[Channel] | ChannelOpening[TypedChannel[ValueT]]:
        """Open a two-way channel; the peer hears of it at once. A server waits until its client has called `open` or
        `incoming`.

        The payload counts as a message. The name and the headers go in headers of that message.
        """
        if codec is not None:
            return typed(self.open(name, payload=payload, headers=announced(headers, codec)), codec)
        block = encode_headers(headers, self.limits.headers)
        pairs: Pairs = ((NAME, encode_name(name)),) if name else ()
        if block:
            pairs = (*pairs, (HEADERS, block))
        self._core.engine.size_of(payload, pairs, ())  # raises if it is too large
        return ChannelOpening(partial(self._common.open, name, payload, pairs))

    def channels(self) -> Sequence[Channel]:
        return self._common.channels()

    def incoming(self) -> AsyncIterator[Channel]:
        return self._common.incoming()

    async def ping(self) -> float:
        """Give the round trip that the link has measured, in seconds; `Unsupported` if it measures none."""
        self._core.budget.owner.check()
        await trio.lowlevel.checkpoint()
        self._core.raise_if_lost()
        round_trip = self._core.round_trip() if self._core.round_trip is not None else None
        if round_trip is None:
            raise Unsupported("Aqueduct has no ping, and this link has measured no round trip")
        return round_trip

    async def shutdown(self, *, grace: float) -> None:
        """Accept no more channels, let the live ones end for up to `grace` seconds, then abort them.

        The peer is told at once to open nothing more: a server's entrypoint accepts no more messages. What came before
        can still be received.
        """
        core = self._core
        core.budget.owner.check()
        await trio.lowlevel.checkpoint()
        if not core.pump.is_lost:
            self._common.drain()
        with trio.move_on_after(grace):
            while core.live and not core.pump.is_lost:
                await core.changed.park()
        if not core.pump.is_lost:
            core.abort_all()

    @property
    def limits(self) -> Limits:
        return self._core.limits

    @property
    def info(self) -> SessionInfo:
        return self._core.info

    def stats(self) -> SessionStats:
        core = self._core
        return SessionStats(
            bytes_received=core.engine.bytes_received,
            bytes_sent=core.pump.bytes_sent,
            messages_received=core.messages_received,
            messages_sent=core.messages_sent,
            channels=core.live,
            queued=core.engine.outbox,
            round_trip=core.round_trip() if core.round_trip is not None else None,
        )

    def __repr__(self) -> str:
        state = "lost" if self._core.pump.is_lost else counted(self._core.live, "half", "halves")
        return f"<aqueduct.{type(self).__name__} {self._core.pump.peer or 'on a stream'}: {state}>"


class Client(Connection):
    """The side whose entrypoint is a sender."""

    @property
    def entrypoint(self) -> Sender:
        """The sender for the first messages, and with them the first channels."""
        self._common.check_unused()
        return self._core.sender_of(self._core.engine.entrypoint)


class Server(Connection):
    """The side whose entrypoint is a receiver."""

    @property
    def entrypoint(self) -> Receiver:
        """The receiver of the first messages, and with them the first channels."""
        self._common.check_unused()
        return self._core.receiver_of(self._core.engine.entrypoint)


class _Channels(Backlog[Channel]):
    """The channels that the peer opened, with those that a client opened while this side has not chosen yet."""

    __slots__ = ("_common",)

    def __init__(self, common: CommonChannels, pace: StartPace) -> None:
        super().__init__(common.taken, pace)
        self._common = common

    def __bool__(self) -> bool:
        return len(self) > 0 or self._common.has_unread

    def drop_all(self) -> list[Channel]:
        if self._common.has_unread:
            self._common.use()
        return super().drop_all()


class CommonChannels:
    """The common channels of one connection; they exclude any other use of its entrypoint."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._entrypoint = core.half_of(core.engine.entrypoint)
        self._opener: Sender | None = None  # where we open channels
        self._acceptor: Receiver | None = None  # where the peer opens channels
        self._opened: dict[Channel, Arrived] = {}
        self._backlog: Backlog[Channel] = _Channels(self, self._core.engine.starts)
        self.unclaimed: Unclaimed = Unclaimed([self._backlog], self._decline, peer=core.info.peer)
        self._is_draining = False
        self._in_use = False
        core.on_end = self.end
        core.on_cancelled = self._drop_waiting
        core.on_unread = self._entrypoint_unread
        core.takes_no_channels = self._is_refused

    def use(self) -> None:
        """Carry common channels from now on."""
        if self._in_use:
            return
        entrypoint, core = self._entrypoint, self._core
        if isinstance(entrypoint, Receiver):
            if entrypoint._tally:
                raise LocalProtocolError("the entrypoint is in use: its messages may open common channels, or be yours")
            self._in_use = True
            self._acceptor = entrypoint
            entrypoint._redirect(self._offered)
            return
        if entrypoint._sent:
            raise LocalProtocolError("the entrypoint is in use: it may open common channels, or be yours")
        self._in_use = True
        self._opener = entrypoint
        if entrypoint.state is Sending.OPEN:
            receiver, ticket = core.new_receiver()
            core.reserved.add(receiver._machine)
            self._acceptor = receiver
            entrypoint._push_with(CLIENT_MARKER, [ticket])
            receiver._redirect(self._offered)
            core.after_command()

    def check_unused(self) -> None:
        """Raise `LocalProtocolError` if the entrypoint carries common channels."""
        if self._in_use:
            raise LocalProtocolError("this connection carries common channels, which need its entrypoint")

    # --- channels that the peer opens

    def incoming(self) -> AsyncIterator[Channel]:
        self.use()
        return self._backlog.claim()

    @property
    def has_unread(self) -> bool:
        """True if the client has begun to open common channels, and this side has not used its entrypoint at all."""
        entrypoint = self._entrypoint
        if self._in_use or not isinstance(entrypoint, Receiver) or entrypoint._tally:
            return False
        first = entrypoint._first_unread()
        return first is not None and first.payload == CLIENT_MARKER

    def _entrypoint_unread(self) -> None:
        if self.has_unread:
            self.unclaimed.arrived()

    def _offered(self, arrived: Arrived | None) -> None:
        """Take a message of the peer that opens a channel; None when no more will come."""
        core = self._core
        if arrived is None:
            if not core.pump.is_lost:  # else `end` follows
                self._backlog.ended()
                core.changed.unpark_all()
            return
        match core.attachments_of(arrived):
            case (Sender() as sender,) if self._opener is None:
                core.engine.consumed(arrived, trio.current_time())
                core.reserved.add(sender._machine)
                self._opener = sender
                core.changed.unpark_all()
                if self._is_draining:
                    sender.close()
            case (Receiver() as receiver, Sender() as sender) if not self._is_draining:
                pairs = dict(reversed(arrived.headers))  # the first of each name counts
                name, headers = decode_name(pairs.get(NAME, b"")), pairs.get(HEADERS, b"")
                channel = Channel(
                    core, sender, receiver, name=name, opening=arrived.payload, headers=headers, is_ours=False
                )
                self._opened[channel] = arrived
                if (refusal := headers_refusal(headers, core.limits.headers)) is not None:
                    self._decline(channel, refusal)
                    return
                if not self._backlog.is_claimed:
                    if (refusal := self.unclaimed.refusal(self._backlog)) is not None:
                        self._decline(channel, refusal)
                        return
                    self.unclaimed.arrived()
                self._backlog.put(channel)
                if receiver._machine.outcome in BROKEN_OFF:  # before the message that brought it
                    self._drop(channel)
                    if receiver._machine.outcome is Outcome.CANCELLED:  # what is forgotten so early was not counted
                        core.engine.starts.spared()
            case (Receiver(), Sender() as sender):
                sender.abort(CLOSING.text, code=CLOSING.code)
                core.dispose(arrived)
            case _:
                core.dispose(arrived)

    def _drop_waiting(self, receiver: Receiver) -> None:
        """Forget a channel that the peer cancelled before the application took it: it needs no work."""
        channel = receiver._channel
        if channel is not None and channel in self._opened:
            self._drop(channel)
            self._core.engine.starts.spared()

    def _drop(self, channel: Channel) -> None:
        self._backlog.drop(channel)
        self._core.engine.consumed(self._opened.pop(channel), trio.current_time())
        channel.close()

    def _decline(self, channel: Channel, reason: Reason) -> None:
        """End a channel that the peer opened and the application hasn't taken."""
        self.taken(channel)
        channel.abort(reason.text, code=reason.code)

    def taken(self, channel: Channel) -> None:
        self._core.engine.consumed(self._opened.pop(channel), trio.current_time())
        self._core.after_command()

    def channels(self) -> list[Channel]:
        """Return the live channels that the application has."""
        halves = (self._core.half_of(machine) for machine in self._core.engine.halves)
        found = dict.fromkeys(half._channel for half in halves if half._channel is not None)
        return [channel for channel in found if channel not in self._opened]

    # --- channels that we open

    async def open(self, name: str, payload: bytes, headers: Pairs) -> Channel:
        """Open a channel; the peer hears of it at once."""
        core = self._core
        core.budget.owner.check()
        self.use()
        await trio.lowlevel.checkpoint_if_cancelled()
        opener = await self._wait_turn(OPENING_SIZE + len(name) + len(payload))
        try:
            sender, to_sender = core.new_sender()
            receiver, to_receiver = core.new_receiver()
            opener._push_with(payload, [to_sender, to_receiver], headers)
            core.unconfirmed.add(sender._machine)
        finally:
            opener._end_turn()
        core.after_command()
        block = next((value for key, value in headers if key == HEADERS), b"")
        return Channel(core, sender, receiver, name=name, opening=payload, headers=block, is_ours=True)

    async def _wait_turn(self, size: int) -> Sender:
        """Wait until a channel may be opened; the caller opens it before its next checkpoint, then `_end_turn`."""
        while True:
            error = self._closed()
            if error is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                raise error
            opener = self._opener
            if opener is None or not self._has_room():
                await self._core.changed.park()
                continue
            try:
                await opener._wait_turn(size)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                continue
            if self._has_room() and opener.state is Sending.OPEN:
                return opener
            opener._end_turn()

    def _has_room(self) -> bool:
        """Leave an eighth of what the peer allows: it may not have heard of the end of the latest channels."""
        most = self._core.limits.channels
        # Receivers that we close are gone at once; the peer has them until it hears of it, as it does of their senders.
        ours = max(self._core.engine.ours, 2 * len(self._core.unconfirmed))
        return ours + 2 <= most - most // 8

    def _closed(self) -> Exception | None:
        """Give the reason why no channel can be opened any more, or None."""
        core = self._core
        if core.pump.is_lost:
            return core.pump.loss()
        if core.is_leaving:
            return closed()
        if self._opener is None:
            has_ended = self._acceptor is None or self._acceptor.state is not Receiving.OPEN
            return refused() if has_ended else None
        return refused() if self._is_refused() else None

    def _is_refused(self) -> bool:
        """Whether the peer has closed the receiver through which we open channels."""
        return self._opener is not None and self._opener.state is not Sending.OPEN

    # --- the end

    def drain(self) -> None:
        """Accept no more channels; those that have come can still be taken."""
        self._is_draining = True
        self._backlog.ended()
        if self._acceptor is not None:
            self._acceptor._refuse_more()
        elif isinstance(self._entrypoint, Receiver):
            self._entrypoint._refuse_more()

    def end(self, error: ErrorMaker | None) -> None:
        """Expect no more channels: the connection is lost, or one side is leaving it."""
        self._is_draining = True
        self._backlog.ended(error)


# --- the plugin


class _Protocol:
    """The plugin that `muxkit.connect` and `muxkit.serve` find under the name `aqueduct`."""

    options: frozenset[str] = frozenset({"config", "headers"})
    links: frozenset[LinkKind] = frozenset({"stream", "multistream"})

    def session(
        self,
        link: trio.abc.Stream | MultistreamLink,
        /,
        *,
        role: Side,
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        config: Config | None = None,
        headers: Pairs = (),
    ) -> AbstractAsyncContextManager[Connection]:
        return connection(
            link, role=role, headers=headers, config=config, limits=limits, observer=observer, linger=linger
        )


protocol: _Protocol = _Protocol()
connect: Connect[Connection] = Connect("aqueduct")
open_server: OpenServer[Connection, Channel] = OpenServer("aqueduct")
reconnecting: Reconnecting[Connection] = Reconnecting("aqueduct")

protect_package("muxkit.protocols.aqueduct")
