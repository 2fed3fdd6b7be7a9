"""yamux sessions: streams of bytes, and channels of messages on top of them.

Most of a session is `muxkit.runtime.mux.MuxSession`. This module adds what only yamux has: streams beside channels, the
acknowledgement of streams that were taken, and the codes of the go-away.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from itertools import chain
from typing import Any, Literal

import trio

from muxkit._limits import Limits
from muxkit._observer import Observer, frames_of
from muxkit._typed import Connect, OpenServer, Reconnecting
from muxkit.core import Reason
from muxkit.core.events import GoingAway, Opened
from muxkit.protocols.yamux._channels import Channel, YamuxStream
from muxkit.protocols.yamux.config import Config
from muxkit.protocols.yamux.engine import Engine
from muxkit.protocols.yamux.receive import StreamReceiver
from muxkit.protocols.yamux.send import StreamSender
from muxkit.runtime import Backlog, LinkLost, Opening, protect_package, protected_manager
from muxkit.runtime.halves.receiving import ReceiveHalf
from muxkit.runtime.halves.sending import SendHalf
from muxkit.runtime.mux import LINGER, MuxSession, running
from muxkit.runtime.pumps.stream import StreamPump
from muxkit.trace import traced

Role = Literal["client", "server"]


@protected_manager
async def session(
    stream: trio.abc.Stream,
    *,
    role: Role,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AsyncGenerator[Session, None]:
    """Run a yamux session on a connected byte stream, which the session owns from now on.

    One side has to be the client and the other one the server, because the role decides which ids a side uses.

    Leaving the block normally finishes all streams, waits until the peer has processed that, sends a go-away and hangs
    up, all within `linger` seconds. It raises `LinkLost` if the peer may not have received everything.
    """

    def make() -> Session:
        return Session(stream, role, config or Config(), limits or Limits(), traced(observer, "yamux session"))

    async with running(make, linger) as mux:
        yield mux


class Session(MuxSession):
    """A yamux session; made by `session`."""

    wire_name = "yamux"

    def __init__(
        self, stream: trio.abc.Stream, role: Role, config: Config, limits: Limits, observer: Observer | None
    ) -> None:
        engine = Engine(config, is_client=role == "client", limits=limits, observer=frames_of(observer))
        super().__init__(stream, "yamux", engine.limits, observer, outbox=engine.waiting)
        self.engine: Engine = engine
        self.pump: StreamPump[Any] = StreamPump(stream, engine, self, outbox=engine.waiting)
        self._incoming: Backlog[Channel] = self.new_backlog()
        self._streams: Backlog[YamuxStream] = self.new_backlog("streams")

    # --- opening

    def open_stream(self) -> Opening[YamuxStream]:
        """Open a stream of bytes: `async with session.open_stream() as stream`, or `await session.open_stream()`.

        This is what programs with another implementation of yamux expect. Leaving the block normally closes the
        stream, and leaving it by an error resets it.
        """
        return Opening(self._open_stream)

    async def _open_stream(self) -> YamuxStream:
        await self.wait_to_open()
        try:
            stream = self.engine.open_stream()
            return self._new_stream(stream.sender, stream.receiver)
        finally:
            self.opened()

    def _new_stream(self, sender: StreamSender, receiver: StreamReceiver) -> YamuxStream:
        return YamuxStream(self, SendHalf(self, sender), ReceiveHalf(self, receiver), sender.stream.id)

    # --- accepting

    def incoming(self) -> AsyncIterator[Channel]:
        return self._incoming.claim()

    def streams(self) -> AsyncIterator[YamuxStream]:
        """Iterate over the streams of bytes that the peer opens, until it ends the session in an orderly way.

        Streams that begin with the opening record of a muxkit channel are given to `incoming` instead.
        """
        claimed = self._streams.claim()
        self.engine.take_streams()
        self.dispatch_events()
        return claimed

    def handle_opened(self, event: Opened) -> None:
        # The peer may have reset the stream in the same read, so its halves are those of the event.
        sender, receiver = event.channel.sender, event.channel.receiver
        assert isinstance(sender, StreamSender)
        assert isinstance(receiver, StreamReceiver)
        backlog: Backlog[Any] = self._incoming if sender.carries_messages else self._streams
        if (reason := self.refusal_of(backlog, event.opening)) is not None:
            self.engine.refuse(event.channel, reason)
        elif sender.carries_messages:
            self.offer(backlog, self.new_channel(sender, receiver, event.opening), receiver)
        else:
            self.offer(backlog, self._new_stream(sender, receiver), receiver)

    def took(self, item: Channel | YamuxStream) -> None:
        sender = item.sending.sender
        assert isinstance(sender, StreamSender)
        if isinstance(item, Channel):
            item.receiving.receiver.consumed((), len(item.sent_with_opening))
        self.engine.accept(sender)
        self.request_write()

    # --- events

    def handle_going_away(self, event: GoingAway) -> None:
        if event.reason:
            self.pump.told(event.reason)
            self.lose("the peer ended the session", by="peer")
        else:
            super().handle_going_away(event)

    def ends_in_order(self) -> bool:
        return self.engine.hung_up_cleanly and not self.pump.is_refusal

    # --- leaving

    def live_halves(self) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        streams = [*self.engine.streams()]
        for half in chain((each.sender for each in streams), (each.receiver for each in streams)):
            if half is not None and isinstance(half.owner, SendHalf | ReceiveHalf):
                yield half.owner

    async def say_goodbye(self) -> None:
        """Send a go-away behind everything else: implementations in Rust and JavaScript drop all streams at once.

        A peer that is ending its halves at the same time waits for our answer, so let it say that first.
        """
        if self.engine.channels:
            with suppress(LinkLost):
                await self.ping()
        self.engine.go_away(Reason())
        self.request_write()
        await self.pump.flushed()


class _Protocol:
    """The protocol plugin that `muxkit.connect` and `muxkit.serve` load under the name `yamux`."""

    options: frozenset[str] = frozenset({"config"})

    def session(
        self,
        stream: trio.abc.Stream,
        *,
        role: Role,
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        config: Config | None = None,
    ) -> AbstractAsyncContextManager[Session]:
        return session(stream, role=role, config=config, limits=limits, observer=observer, linger=linger)


protocol: _Protocol = _Protocol()
connect: Connect[Session] = Connect("yamux")
open_server: OpenServer[Session, Channel] = OpenServer("yamux")
reconnecting: Reconnecting[Session] = Reconnecting("yamux")

protect_package("muxkit.protocols.yamux")
