"""The receiving half of a stream, `StreamReceiver`: it counts the window, and delivers bytes or messages.

The bytes of a stream can be the messages of a muxkit channel. The first bytes that the peer sends on a stream show
whether they are.
"""

from __future__ import annotations

from enum import Enum

from muxkit._errors import RemoteProtocolError
from muxkit.core import Reason
from muxkit.core.events import Finished, Opened, Received
from muxkit.core.messages import HEAD_SIZE, MessageReader, may_be_opening
from muxkit.core.window_receiver import WindowReceiver
from muxkit.protocols.yamux.config import INITIAL_WINDOW
from muxkit.protocols.yamux.state import State, Stream


class Kind(Enum):
    """The kind of a stream."""

    UNKNOWN = "unknown"
    """The peer has opened the stream, and its first bytes haven't arrived."""
    BYTES = "bytes"
    """The stream carries bytes, as in any other yamux implementation."""
    MESSAGES = "messages"
    """The stream carries the messages of a muxkit channel."""


class StreamReceiver(WindowReceiver):
    """Receives bytes, and assembles messages from them if the stream is a channel."""

    __slots__ = ("_head", "_reader", "_state", "has_ended", "is_stopped", "kind", "stream")

    def __init__(self, state: State, stream: Stream, kind: Kind) -> None:
        super().__init__(state, INITIAL_WINDOW)
        self._state = state
        self.stream: Stream = stream
        self.kind: Kind = kind
        self.is_stopped: bool = False
        """True once the application doesn't want more data."""
        self.has_ended: bool = False
        """True once a FIN has arrived, or the stream was reset."""
        # The first bytes of a stream, until they suffice to tell its kind.
        self._head = b""
        self._reader: MessageReader | None = None
        if kind is Kind.MESSAGES:
            self._reader = MessageReader(state.limits.message)

    @property
    def label(self) -> str:
        return self.stream.label

    @property
    def is_silent(self) -> bool:
        """True if the peer has opened the stream and hasn't sent anything on it."""
        return self.kind is Kind.UNKNOWN and not self._head

    def stop(self, reason: Reason) -> None:
        if not (self.is_stopped or self.has_ended):
            self.is_stopped = True
            self._drop_partial()
            self._state.control.unconfirmed.append(self)
            if self.stream.sender.is_confirmed:
                self._state.closed(self.stream)

    def grant(self, amount: int) -> None:
        if not self.has_ended:
            self.stream.grant += amount
            self._state.control.dirty[self.stream] = None

    # --- for the engine

    def frame_begins(self, size: int) -> None:
        """Charge the payload of a data frame to the window, when the frame's header has arrived.

        Raises:
            RemoteProtocolError: The stream has ended, or the payload is larger than the window.
        """
        if self.has_ended:
            raise RemoteProtocolError(f"data on {self.label} after its FIN", rule="yamux-E03")
        if size > self.credit_in:
            raise RemoteProtocolError(
                f"window exceeded on {self.label}: expected at most {self.credit_in} bytes, got {size}",
                rule="yamux-W03",
            )
        self.arrived(size)
        if self._state.overdraft > 0 and self.held > self._state.limits.channel_floor:
            limit = self._state.limits.connection_bytes
            error = f"too much data waits for the application on all streams: expected at most {limit} bytes"
            self._state.break_off(self.stream, RemoteProtocolError(error, limit="connection_bytes"))

    def receive(self, data: bytes, left: int) -> None:
        """Handle bytes of a data frame's payload. `left` more bytes of the payload are still to arrive."""
        if self.has_ended:  # the stream was reset while the frame was arriving
            self.consumed((), len(data))
        elif self.is_stopped:
            self.consumed((), len(data))
            if self.stream.sender.is_ended:
                self._state.reset(self.stream, Reason())
        elif self.kind is Kind.BYTES:
            self._state.events.append(Received(self, [data]))
        elif self.kind is Kind.MESSAGES:
            self._read(data, left)
        else:
            self._head += data
            if not may_be_opening(self._head):
                self.become(Kind.BYTES, left)
            elif len(self._head) >= HEAD_SIZE:
                self.become(Kind.MESSAGES, left)

    def become(self, kind: Kind, left: int = 0) -> None:
        """Set the kind of a stream whose kind was unknown.

        Either its first bytes have shown the kind, or the stream has to become a stream of bytes without them.
        """
        self.kind = kind
        head, self._head = self._head, b""
        if kind is Kind.BYTES:
            self._state.events.append(Opened(self.stream.halves, b""))
        else:
            self.stream.sender.carries_messages = True
            self._reader = MessageReader(self._state.limits.message)
        if head:
            self.receive(head, left)

    def ended(self) -> None:
        """Handle a FIN of the peer."""
        if self.has_ended:
            raise RemoteProtocolError(f"a second FIN on {self.label}", rule="yamux-E04")
        if self.kind is Kind.UNKNOWN:
            self.become(Kind.BYTES)
        if self._reader is not None and not self._reader.is_between_messages:
            error = RemoteProtocolError(f"{self.label} ended in the middle of a message", rule="yamux-C05")
            self._state.break_off(self.stream, error)
            return
        self._state.events.append(Finished(self))
        self.retire()
        self._state.remove_if_final(self.stream)

    def was_confirmed(self) -> None:
        """Do nothing. The peer has processed a ping that we sent after `stop`, which changes nothing for this half."""

    def retire(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._drop_partial()
            super().retire()

    # --- inside

    def _read(self, data: bytes, left: int) -> None:
        """Assemble messages, and consume the bytes of prefixes and of the greeting, which no application receives."""
        reader = self._reader
        assert reader is not None  # the kind is MESSAGES, so there is a reader
        had_opened, partial = reader.opening is not None, reader.partial
        try:
            messages = reader.feed(data)
        except RemoteProtocolError as error:
            self._reader = None
            self.consumed((), partial + len(data))
            self._state.break_off(self.stream, error)
            return
        kept = sum(map(len, messages)) + reader.partial - partial
        if reader.opening is not None and not (had_opened or self.stream.is_ours):
            kept += len(reader.opening)  # the opening is consumed when the application takes the channel
            self._state.events.append(Opened(self.stream.halves, reader.opening))
        self.consumed((), len(data) - kept)
        if messages:
            self._state.events.append(Received(self, messages))
        if reader.missing > left or self.window.unfinished:
            # The bytes of the current frame are charged to the window already, so the message needs credit only for its
            # remaining bytes.
            self.needs(max(0, reader.missing - left))

    def _drop_partial(self) -> None:
        """Drop an incomplete message, because nobody will receive it."""
        reader, self._reader = self._reader, None
        size = len(self._head) + (0 if reader is None else reader.partial)
        self._head = b""
        if size:
            self.consumed((), size)
