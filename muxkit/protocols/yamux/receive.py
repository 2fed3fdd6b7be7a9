"""The receiving half of a stream: its window, and whether its bytes are messages."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from muxkit._errors import RemoteProtocolError
from muxkit.core import Reason, ReceiveWindow
from muxkit.core.events import Finished, Opened, Received
from muxkit.core.halves import Receiver
from muxkit.protocols.yamux.config import INITIAL_WINDOW
from muxkit.protocols.yamux.messages import HEAD_SIZE, MessageReader, may_be_opening
from muxkit.protocols.yamux.state import State, Stream

PARTS_OF_WINDOW: Final = 8
"""The application may take an eighth of the window before the engine hears of it, so that grants stay timely."""


class Kind(Enum):
    """What the bytes of a stream are."""

    UNKNOWN = "unknown"  # the peer opened it, and its first bytes have not come
    BYTES = "bytes"
    MESSAGES = "messages"


class StreamReceiver(Receiver[bytes]):
    """Receives bytes, or puts messages together from them."""

    __slots__ = ("_head", "_reader", "_state", "has_ended", "is_stopped", "kind", "owner", "stream", "window")

    def __init__(self, state: State, stream: Stream, kind: Kind) -> None:
        self.owner: object | None = None
        self.stream: Stream = stream
        self.kind: Kind = kind
        self.is_stopped: bool = False
        """True once the application wants no more."""
        self.has_ended: bool = False
        """True once a FIN came, or the stream was reset."""
        self.window: ReceiveWindow = ReceiveWindow(state.limits.channel_bytes, state.budget)
        self.window.start(state.now, INITIAL_WINDOW)
        self._state = state
        self._head = b""  # the first bytes of a stream of unknown kind
        self._reader: MessageReader | None = None
        if kind is Kind.MESSAGES:
            self._reader = MessageReader(state.limits.message)
        elif kind is Kind.UNKNOWN:
            state.undecided += 1

    @property
    def label(self) -> str:
        return self.stream.label

    @property
    def carries_messages(self) -> bool:
        return self.kind is Kind.MESSAGES

    @property
    def is_silent(self) -> bool:
        """True while the peer, which opened the stream, has sent nothing on it."""
        return self.kind is Kind.UNKNOWN and not self._head

    @property
    def credit_in(self) -> int:
        return self.window.credit

    @property
    def held(self) -> int:
        return self.window.held

    @property
    def lag(self) -> int:
        window = self.window
        return 0 if window.lent else window.target // PARTS_OF_WINDOW

    # --- commands

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        """Count bytes as taken; the credit that they gave room for is granted again, a half window at a time."""
        self._state.held -= size
        grant, repaid = self.window.consumed(size, self._state.now)
        if repaid:
            self._repay(repaid)
        return self._grant(grant) if grant else repaid > 0

    def stop(self, reason: Reason) -> None:
        if self.is_stopped or self.has_ended:
            return
        self.is_stopped = True
        self._drop_partial()
        if not self.stream.is_gone and self.stream.reset is None:
            self._state.control.unconfirmed.append(self)
            if self.stream.sender.is_confirmed:
                self._state.closed(self.stream)

    # --- for the engine

    def arrives(self, size: int) -> None:
        """The header of a data frame has come: count its payload against the window."""
        if self.has_ended:
            raise RemoteProtocolError(f"data on {self.label} after its FIN", rule="yamux-E03")
        if size > self.window.credit:
            raise RemoteProtocolError(
                f"window exceeded on {self.label}: expected at most {self.window.credit} bytes, got {size}",
                rule="yamux-W03",
            )
        self.window.arrived(size)
        state = self._state
        state.held += size
        lent_out = state.limits.reassembly - state.reassembly.left
        if state.held > state.limits.connection_bytes + lent_out and self.window.held > state.limits.channel_floor:
            error = RemoteProtocolError(
                f"{state.held} bytes of all streams wait for the application: expected at most "
                f"{state.limits.connection_bytes}",
                limit="connection_bytes",
            )
            state.break_off(self.stream, error)

    def receive(self, data: bytes, left: int = 0) -> None:
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
        self._state.undecided -= 1
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
        elif self._reader is not None and not self._reader.is_between_messages and not self.is_stopped:
            error = RemoteProtocolError(f"{self.label} ended in the middle of a message", rule="yamux-C05")
            self._state.break_off(self.stream, error)
            return
        self._state.events.append(Finished(self))
        self.retire()
        self._state.remove_if_final(self.stream)

    def was_confirmed(self) -> None:
        """The peer has processed a ping that we sent after `stop`; nothing depends on it here."""

    def retire(self) -> None:
        """No more data will come: grant nothing, and give back what was lent."""
        if not self.has_ended:
            self.has_ended = True
            if self.kind is Kind.UNKNOWN:
                self.kind = Kind.BYTES
                self._state.undecided -= 1
            self._state.reassembly.leave(self.stream)
            self._drop_partial()
            self._repay(self.window.retire())

    # --- inside

    def _read(self, data: bytes, left: int) -> None:
        """Put messages together. The prefixes are consumed here, and so is the greeting."""
        reader = self._reader
        assert reader is not None  # as the stream carries messages
        had_opened = reader.opening is not None
        partial = reader.partial
        try:
            messages = reader.feed(data)
        except RemoteProtocolError as error:
            self._reader = None
            self.consumed((), partial + len(data))
            self._state.break_off(self.stream, error)
            return
        payload = sum(map(len, messages)) + reader.partial - partial
        opening = reader.opening
        if opening is not None and not had_opened:
            payload += len(opening)
            if self.stream.is_ours:
                payload -= len(opening)
            else:
                self._state.events.append(Opened(self.stream.halves, opening))
        self.consumed((), len(data) - payload)
        if messages:
            self._state.events.append(Received(self, messages))
        self.window.unfinished = max(0, reader.missing - left)  # what the frame still brings is paid for
        if self.window.unfinished:
            self._borrow()

    def _borrow(self) -> None:
        """Lend the peer the credit that a message larger than the window still needs."""
        shortfall, reassembly = self.window.shortfall(), self._state.reassembly
        if shortfall and not reassembly.waits(self.stream) and reassembly.borrow(self.stream, shortfall):
            self.lend(shortfall)

    def lend(self, amount: int) -> None:
        """Grant credit beyond the window, out of the connection's budget for large messages."""
        self.window.lend(amount)
        self._grant(amount)

    @property
    def shortfall(self) -> int:
        """The credit that the message that was begun still needs beyond what the peer has."""
        return self.window.shortfall()

    def _repay(self, amount: int) -> None:
        """Give back what was lent, and serve the streams that wait for it."""
        reassembly = self._state.reassembly
        reassembly.repay(amount)
        while (stream := reassembly.next_waiting()) is not None:
            shortfall = stream.receiver.shortfall
            if not shortfall:
                reassembly.leave(stream)
            elif reassembly.serve(stream, shortfall):
                stream.receiver.lend(shortfall)
            else:
                break

    def _grant(self, amount: int) -> bool:
        """Queue a window update."""
        if self.stream.is_gone or self.has_ended:
            return False
        self.stream.grant += amount
        self._state.control.owe(self.stream)
        return True

    def _drop_partial(self) -> None:
        """Forget the message that was begun; nobody will receive it."""
        reader, self._reader = self._reader, None
        size = len(self._head) + (0 if reader is None else reader.partial)
        self._head = b""
        if size:
            self.consumed((), size)
