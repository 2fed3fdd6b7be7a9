"""Aqueduct connections for applications, and the protocol plugin for `muxkit.connect` and `muxkit.serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import trio

from muxkit._limits import Limits
from muxkit.protocols.aqueduct._session.common import CommonChannels
from muxkit.protocols.aqueduct._session.core import Core
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.frames import Role
from muxkit.runtime import (
    LinkKind,
    MultistreamLink,
    Opening,
    SessionInfo,
    SessionStats,
    Unsupported,
    background,
    protect_package,
    protected_manager,
)
from muxkit.runtime import Session as CommonSession

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from muxkit._observer import Observer
    from muxkit.protocols.aqueduct._session.common import Channel
    from muxkit.protocols.aqueduct._session.core import Receiver, Sender
    from muxkit.protocols.aqueduct.engine import Ticket
    from muxkit.protocols.aqueduct.frames import Headers

    Pairs = Sequence[tuple[bytes, bytes]]
    Side = Literal["client", "server"]

CLOSE_TIMEOUT = 5.0  # s


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

    def make_core() -> Core:
        return Core(
            link,
            Role.CLIENT if role == "client" else Role.SERVER,
            headers=headers,
            config=config or Config(),
            limits=limits or Limits(),
            observer=observer,
        )

    return _run(Client if role == "client" else Server, make_core, linger)


@protected_manager
async def _run(
    kind: type[Client | Server], make_core: Callable[[], Core], linger: float
) -> AsyncGenerator[Client | Server, None]:
    core = make_core()
    connection = kind(core)
    async with background() as nursery:
        nursery.start_soon(core.pump.run)
        try:
            yield connection
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
        self.core = core
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
        self.core.raise_if_lost()
        if keep == "sender":
            return self.core.new_sender(oneshot=oneshot, headers=headers)
        return self.core.new_receiver(oneshot=oneshot, headers=headers)

    async def peer_headers(self) -> Headers:
        """Wait for the headers that the peer gave to `connection`."""
        await trio.lowlevel.checkpoint()
        await self.core.connected.wait()
        if self.core.peer_headers is None:
            raise self.core.pump.loss()
        return self.core.peer_headers

    # --- the common session

    def open(self) -> AbstractAsyncContextManager[Channel]:
        """Open a two-way channel; the peer hears of it at once. A server waits until its client has called `open` or
        `incoming`.
        """
        return Opening(self._common.open)

    def incoming(self) -> AsyncIterator[Channel]:
        return self._common.incoming()

    async def ping(self) -> float:
        """Give the round trip that the link has measured, in seconds; `Unsupported` if it measures none."""
        await trio.lowlevel.checkpoint()
        self.core.raise_if_lost()
        round_trip = self.core.round_trip() if self.core.round_trip is not None else None
        if round_trip is None:
            raise Unsupported("Aqueduct has no ping, and this link has measured no round trip")
        return round_trip

    async def shutdown(self, *, grace: float) -> None:
        """Accept no more channels, let the live ones end for up to `grace` seconds, then abort them.

        The peer is told at once to open nothing more: a server's entrypoint accepts no more messages. What came before
        can still be received.
        """
        core = self.core
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
        return self.core.limits

    @property
    def info(self) -> SessionInfo:
        return SessionInfo(protocol="aqueduct", peer=self.core.pump.peer)

    def stats(self) -> SessionStats:
        core = self.core
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
        state = "lost" if self.core.pump.is_lost else f"{self.core.live} halves"
        return f"<aqueduct.{type(self).__name__} {self.core.pump.peer or 'on a stream'}: {state}>"


class Client(Connection):
    """The side whose entrypoint is a sender."""

    @property
    def entrypoint(self) -> Sender:
        """The sender for the first messages, and with them the first channels."""
        self._common.check_unused()
        return self.core.sender_of(self.core.engine.entrypoint)


class Server(Connection):
    """The side whose entrypoint is a receiver."""

    @property
    def entrypoint(self) -> Receiver:
        """The receiver of the first messages, and with them the first channels."""
        self._common.check_unused()
        return self.core.receiver_of(self.core.engine.entrypoint)


class _Protocol:
    """The plugin that `muxkit.connect` and `muxkit.serve` find under the name `aqueduct`."""

    options = frozenset({"config", "headers"})
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


protocol = _Protocol()


protect_package("muxkit.protocols.aqueduct")
