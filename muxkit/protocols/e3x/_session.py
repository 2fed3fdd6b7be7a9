"""How does a program use e3x? A session on packets or on a byte stream, with reliable and unreliable channels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

import attrs
import trio

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.e3x._config import Config
from muxkit.protocols.e3x._session_channels import Channel, Opening
from muxkit.protocols.e3x._session_connection import Connection
from muxkit.protocols.e3x._session_liveness import RESERVED
from muxkit.runtime import (
    Backlog,
    ChannelStopped,
    SessionInfo,
    SlotQueue,
    background,
    protect_package,
    protected_manager,
)
from muxkit.runtime import Session as CommonSession
from muxkit.runtime import SessionStats as CommonStats

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from muxkit._observer import Observer
    from muxkit.protocols.e3x._events import Opened
    from muxkit.runtime import LinkKind, PacketLink

LINGER = 5.0  # s, for taking leave
TYPE = "muxkit"  # of channels whose opener does not say what they are about

Role = Literal["connector", "listener"]


@protected_manager
async def session(
    link: PacketLink | trio.abc.Stream,
    *,
    role: Role,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AsyncGenerator[Session, None]:
    """A session on a link to one peer, packets or a byte stream, which it owns from now on.

    The connector's channels have odd ids, the listener's even ones; nothing else depends on the role, but the two sides
    must differ. Leaving the block normally ends all channels, waits until the peer's application has processed what
    was sent, says goodbye and hangs up, all within `linger` seconds; if it is not known that everything was processed,
    that raises `LinkLost`. Leaving by an error or a cancellation hangs up at once.
    """
    mux = Session(link, role, config or Config(), limits or Limits(), observer)
    connection = mux.connection
    async with background() as nursery:
        nursery.start_soon(connection.pump.run)
        nursery.start_soon(connection.liveness.run)
        try:
            yield mux
        except BaseException:
            connection.lose("the session was left by an error", by="local", parting=b"error")
            raise
        await connection.leave(linger)


@attrs.frozen(kw_only=True)
class SessionStats(CommonStats):
    """The common counters, and what this protocol has beside them; times in seconds."""

    packets_received: int
    packets_sent: int
    resent: int
    """Packets that were sent again."""
    lost: int
    """Packets that the peer missed."""
    evicted: int
    """Unreliable messages that were too old when their turn to be sent came."""
    dropped: int
    """Unreliable messages that came, and made way for newer ones before the application took them."""
    too_large: int
    """Packets that the link could not take, since its path has become narrower."""
    refused: int
    """Errors of the network that cost one packet each."""
    faults: dict[str, int]
    """What came and was dropped, by the name of its `Fault`."""
    least_round_trip: float | None
    queue: float
    """What the path's queue adds to the round trip."""
    rate: float
    """Bytes a second that may be sent now: our congestion control. Without a meaning over a byte stream."""
    falls: int
    """How often the rate was lowered."""


class Session(CommonSession):
    """One e3x peer at work; made by `session`."""

    def __init__(
        self,
        link: PacketLink | trio.abc.Stream,
        role: Role,
        config: Config,
        limits: Limits,
        observer: Observer | None,
    ) -> None:
        if role not in ("connector", "listener"):
            raise ValueError(f"role={role!r}: one side is the connector, the other the listener")
        self._backlog: Backlog[Channel] = Backlog(lambda channel: channel.took())
        self._draining = False
        self._openers = SlotQueue(self._places)
        self.connection = Connection(
            link,
            odd=role == "connector",
            config=config,
            limits=limits,
            observer=observer,
            on_opened=self._opened,
            on_goodbye=self._goodbye,
            on_gone=self._openers.wake_waiters,
        )
        self._engine = self.connection.engine
        self._limits = self._engine.limits

    # --- channels

    def open(
        self, *, type: str = TYPE, reliable: bool = True, body: bytes = b""
    ) -> AbstractAsyncContextManager[Channel]:
        """A channel to the peer, which hears of it at once; waits only for room under the limits.

        `type` says what it is about. `body`, if there is one, is its first message and travels with the opening.
        """
        return Opening(lambda: self._open(type, reliable, body))

    async def _open(self, type: str, reliable: bool, body: bytes) -> Channel:
        await trio.lowlevel.checkpoint_if_cancelled()
        if type in RESERVED:
            raise LocalProtocolError(f"channels of type {type!r} are the session's own")
        try:
            await self._openers.wait_for_slot()
            error = self._closed()
            if error is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                raise error
            return self._opened_here(type, reliable, body)
        finally:
            self._openers.wake_waiters()

    def _opened_here(self, type: str, reliable: bool, body: bytes) -> Channel:
        connection = self.connection
        connection.touch()
        opened = self._engine.open(type, body, reliable=reliable)
        channel = connection.live[opened.id] = Channel(connection, opened, spoke=bool(body))
        connection.messages_sent += bool(body)
        connection.ring()
        return channel

    def _places(self) -> int:
        """How many may open now; those who wait in vain come out as well, and hear why."""
        return self._engine.places if self._closed() is None else sys.maxsize

    def _closed(self) -> Exception | None:
        """Why nothing can be opened any more, or None."""
        if self.connection.pump.is_lost:
            return self.connection.pump.loss()
        if self.connection.liveness.peer_left:
            return ChannelStopped("no channel can be opened any more: the peer has left")
        if self._draining:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the session")
        return None

    def incoming(self) -> AsyncIterator[Channel]:
        """The channels that the peer opens, reliable and unreliable; `channel.type` says what they are about."""
        return self._backlog

    def _opened(self, event: Opened) -> None:
        if self._draining:
            self._engine.err(event.channel, "closing")
        elif len(self._backlog) >= self._limits.backlog:
            self._engine.err(event.channel, "too many channels")
        else:
            connection = self.connection
            connection.messages_received += bool(event.body)
            channel = connection.live[event.channel.id] = Channel(connection, event.channel, event.body)
            self._backlog.put(channel)

    def _goodbye(self, error: Callable[[], Exception] | None) -> None:
        """Nothing more is opened."""
        self._draining = True
        self._backlog.ended(error)
        self._openers.wake_waiters()

    # --- the session

    async def ping(self) -> float:
        """One round trip through the peer's session, by a channel of a type that sessions keep for themselves."""
        return await self.connection.liveness.ping()

    async def shutdown(self, *, grace: float) -> None:
        """Take no new channels, let the live ones end for up to `grace` seconds, then break them off.

        What the peer opens from now on is answered with an err.
        """
        await trio.lowlevel.checkpoint()
        connection = self.connection
        self._goodbye(None)
        with trio.move_on_after(grace):
            while connection.live and not connection.pump.is_lost:
                await connection.gone.park()
        if not connection.pump.is_lost:
            connection.abort_all()

    @property
    def packet_limit(self) -> int:
        """The largest packet that is sent now, in bytes: what was configured, or less if the path takes less."""
        return self._engine.packet_size

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def info(self) -> SessionInfo:
        return SessionInfo(protocol="e3x", peer=self.connection.pump.peer)

    def stats(self) -> SessionStats:
        connection, stats = self.connection, self._engine.stats()
        pump = connection.pump
        return SessionStats(
            bytes_received=stats.bytes_received,
            bytes_sent=stats.bytes_sent,
            messages_received=connection.messages_received,
            messages_sent=connection.messages_sent,
            channels=len(connection.live),
            queued=stats.unsent + pump.unsent,
            round_trip=connection.liveness.round_trip if stats.round_trip is None else stats.round_trip,
            packets_received=stats.packets_received,
            packets_sent=stats.packets_sent,
            resent=stats.resent,
            lost=stats.lost,
            evicted=stats.evicted,
            dropped=connection.dropped,
            too_large=connection.too_large,
            refused=connection.refused,
            faults=stats.faults,
            least_round_trip=stats.least_round_trip,
            queue=stats.queue,
            rate=stats.rate,
            falls=stats.falls,
        )

    def __repr__(self) -> str:
        state = "lost" if self.connection.pump.is_lost else f"{len(self.connection.live)} channels"
        return f"<e3x.Session {self.connection.pump.peer or 'on a link'}: {state}>"


class _Protocol:
    """What `muxkit.connect` and `muxkit.serve` find under the name `e3x`."""

    options = frozenset({"config"})
    links: frozenset[LinkKind] = frozenset({"stream", "packets"})

    def session(
        self,
        link: PacketLink | trio.abc.Stream,
        /,
        *,
        role: Literal["client", "server"],
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        config: Config | None = None,
    ) -> AbstractAsyncContextManager[Session]:
        side: Role = "connector" if role == "client" else "listener"
        return session(link, role=side, config=config, limits=limits, observer=observer, linger=linger)


protocol = _Protocol()


protect_package("muxkit.protocols.e3x")
