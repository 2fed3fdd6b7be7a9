"""Which streams does the peer write? Each with its sequence; those that came too early wait for the handshake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.aqueduct._incoming import Incoming
from muxkit.protocols.aqueduct._sending import Alone, SenderMachine
from muxkit.protocols.aqueduct._stalls import Stalls

if TYPE_CHECKING:
    from muxkit.core import StreamId
    from muxkit.protocols.aqueduct._channels import Channels
    from muxkit.protocols.aqueduct._datagrams import Datagrams
    from muxkit.protocols.aqueduct._dispatch import Dispatch


class Reader:
    """The streams that are open or not consumed."""

    def __init__(self, channels: Channels, dispatch: Dispatch, datagrams: Datagrams, most: int) -> None:
        self.incoming: dict[StreamId, Incoming] = {}
        self._channels = channels
        self._dispatch = dispatch
        self._datagrams = datagrams
        self._most = most
        self._held_back = 0  # bytes that wait for the connection headers
        self._has_gone_on = False
        channels.crowd.on_done = self.release
        self.stalls = Stalls(channels, self.incoming)

    def stream(self, stream: StreamId, data: bytes, fin: bool) -> None:
        incoming = self.incoming.get(stream) or self._open(stream)
        if incoming.fin:
            return  # the link should not have
        incoming.unconsumed += len(data)
        incoming.fin = fin
        if data:
            incoming.feed(data)
        if incoming.waits_for_peer:
            self.stalls.watch()
        if incoming.is_held_back:
            if not self._dispatch.is_open:
                self._hold_back(len(data))
        elif fin:
            incoming.check_end()
        self.release(incoming)
        if self._dispatch.is_open and not self._has_gone_on:
            self._go_on()

    def missing(self, stream: StreamId) -> int:
        """Bytes until the frame that has begun may end; fewer are only collected."""
        incoming = self.incoming.get(stream)
        return incoming.missing if incoming is not None else 0

    def reset(self, stream: StreamId) -> None:
        incoming = self.incoming.get(stream)
        if incoming is not None and not incoming.fin:
            incoming.reset()
            self.release(incoming)

    def stopped(self, stream: StreamId) -> None:
        """One of ours."""
        line = self._channels.line
        out = line.streams.get(stream)
        if out is None:
            return
        self._channels.check_stream_churn("a stream was stopped")
        source = out.source
        line.drop(out)
        if isinstance(source, SenderMachine | Alone):
            source.give_up()

    def release(self, incoming: Incoming) -> None:
        """It may be over."""
        if incoming.is_over:
            self.incoming.pop(incoming.id, None)

    def clear(self) -> None:
        self.incoming.clear()

    def _open(self, stream: StreamId) -> Incoming:
        if len(self.incoming) >= self._most:
            raise RemoteProtocolError(
                f"{len(self.incoming) + 1} streams at once against {self._most}; "
                "raise Config(streams=…) if this peer is right"
            )
        incoming = self.incoming[stream] = Incoming(stream, self._channels, self._dispatch)
        return incoming

    def _hold_back(self, size: int) -> None:
        most = self._channels.limits.connection_bytes
        self._held_back += size
        if self._held_back > most:
            raise RemoteProtocolError(
                f"{self._held_back} bytes before the connection headers against {most}",
                limit="connection_bytes",
                rule="aqueduct-H05",
            )

    def _go_on(self) -> None:
        """What waited for the connection headers, in the order in which it came."""
        self._has_gone_on = True
        for incoming in [*self.incoming.values()]:
            if incoming.is_held_back:
                incoming.go_on()
                self.release(incoming)
        for data in self._datagrams.take_early():
            self._datagrams.feed(data)
