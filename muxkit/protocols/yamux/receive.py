"""The receiving half of a stream: its window, and whether its bytes are messages."""

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
    """What the bytes of a stream are."""

    UNKNOWN = "unknown"  # the peer opened it, and its first bytes have not come
    BYTES = "bytes"
    MESSAGES = "messages"


class StreamReceiver(WindowReceiver):
    """Receives bytes, or puts messages together from them."""

    __slots__ = ("_head", "_reader", "_state", "has_ended", "is_stopped", "kind", "stream")

    def __init__(self, state: State, stream: Stream, kind: Kind) -> None:
        super().__init__(state, INITIAL_WINDOW)
        self._state = state
        self.stream: Stream = stream
        self.kind: Kind = kind
        self.is_stopped: bool = False  # the application wants no more
        self.has_ended: bool = False  # a FIN came, or the stream was reset
        self._head = b""  # the first bytes of a stream of unknown kind
        self._reader: MessageReader | None = None
        if kind is Kind.MESSAGES:
            self._reader = MessageReader(state.limits.message)

    @property
    def label(self) -> str:
        return self.stream.label

    @property
    def is_silent(self) -> bool:
        """True while the peer, which opened the stream, has sent nothing on it."""
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
        """The header of a data frame has come: count its payload against the window."""
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
        """Take in bytes of a data frame's payload, of which `left` more bytes are to come."""
        if self.has_ended:  # it was reset while the frame arrived
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
        """Decide about a stream of unknown kind: its first bytes have come, or the application takes all bytes."""
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
        """A FIN came."""
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
        """The peer has processed a ping that we sent after `stop`; nothing depends on it here."""

    def retire(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._drop_partial()
            super().retire()

    # --- inside

    def _read(self, data: bytes, left: int) -> None:
        """Put messages together. The prefixes and the greeting count as consumed here."""
        reader = self._reader
        assert reader is not None  # as the stream carries messages
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
            kept += len(reader.opening)  # until the application takes the channel
            self._state.events.append(Opened(self.stream.halves, reader.opening))
        self.consumed((), len(data) - kept)
        if messages:
            self._state.events.append(Received(self, messages))
        if reader.missing > left or self.window.unfinished:
            self.needs(max(0, reader.missing - left))  # the rest of the frame is paid for

    def _drop_partial(self) -> None:
        """Forget the message that was begun; nobody will receive it."""
        reader, self._reader = self._reader, None
        size = len(self._head) + (0 if reader is None else reader.partial)
        self._head = b""
        if size:
            self.consumed((), size)
