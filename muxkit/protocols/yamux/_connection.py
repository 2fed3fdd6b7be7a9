"""The implementation below a yamux session: the parts that yamux adds to `runtime.connection.MuxConnection`.

In addition to channels, yamux has streams of bytes. It acknowledges a stream when the application takes it. It ends a
connection with a go-away that carries a code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import trio

from muxkit._limits import Limits
from muxkit._observer import Observer, frames_of
from muxkit.core import Reason
from muxkit.core.events import Opened
from muxkit.protocols.yamux._channels import Channel, YamuxStream
from muxkit.protocols.yamux.config import Config
from muxkit.protocols.yamux.engine import Engine
from muxkit.protocols.yamux.receive import StreamReceiver
from muxkit.protocols.yamux.send import StreamSender
from muxkit.runtime import Backlog, LinkLost
from muxkit.runtime.connection import MuxConnection
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf
from muxkit.runtime.pumps.stream import StreamPump

Role = Literal["client", "server"]


class Connection(MuxConnection[Engine, Channel]):
    """The connection of a yamux session."""

    wire_name = "yamux"
    channel_type = Channel

    def __init__(
        self, stream: trio.abc.Stream, role: Role, config: Config, limits: Limits, observer: Observer | None
    ) -> None:
        engine = Engine(config, is_client=role == "client", limits=limits, observer=frames_of(observer))
        super().__init__(engine, stream, "yamux", engine.limits, observer, outbox=engine.waiting)
        self.pump = StreamPump(stream, engine, self, outbox=engine.waiting)
        self.streams: Backlog[YamuxStream] = self.new_backlog("streams")

    # --- streams and channels that this side opens

    async def open_stream(self) -> YamuxStream:
        """Open a stream of bytes. Waits while too many streams are open or unacknowledged."""
        await self.wait_to_open()
        try:
            stream = self.engine.open_stream()
            return self._new_stream(stream.sender, stream.receiver)
        finally:
            self.opened()

    def _new_stream(self, sender: StreamSender, receiver: StreamReceiver) -> YamuxStream:
        return YamuxStream(self, SendHalf(self, sender), ReceiveHalf(self, receiver), sender.stream.id)

    # --- streams and channels that the peer opens

    def handle_opened(self, event: Opened) -> None:
        # Use the halves in the event. The peer may have reset the stream in the same read, and then the engine's
        # `Stream` has no halves any more.
        sender, receiver = event.channel.sender, event.channel.receiver
        assert isinstance(sender, StreamSender)
        assert isinstance(receiver, StreamReceiver)
        if sender.carries_messages:
            super().handle_opened(event)
        elif (reason := self.refusal_of(self.streams, b"")) is not None:
            self.engine.refuse(event.channel, reason)
        else:
            self.offer(self.streams, self._new_stream(sender, receiver), receiver)

    def took(self, item: Channel | YamuxStream) -> None:
        sender = item.sending.sender
        assert isinstance(sender, StreamSender)
        if isinstance(item, Channel):
            item.receiving.receiver.consumed((), len(item.sent_with_opening))
        self.engine.accept(sender)
        self.request_write_soon()

    # --- events

    def ends_in_order(self) -> bool:
        return self.engine.hung_up_cleanly and not self.pump.is_refusal

    # --- leaving

    def live_halves(self) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        return self.halves_of([*self.engine.streams()])

    async def say_goodbye(self) -> None:
        """Send a go-away after all other output.

        The implementations in Rust and JavaScript drop all streams when they receive a go-away. If streams are left,
        the peer may be ending its halves of them right now. So we first do a round trip, which lets the peer finish.
        """
        if self.engine.channels:
            with suppress(LinkLost):
                await self.ping()
        self.engine.go_away(Reason())
        self.request_write()
        await self.pump.flushed()
