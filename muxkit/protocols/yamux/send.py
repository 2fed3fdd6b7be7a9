"""The sending half of a stream: its queue, the peer's credit, and the data frames that it writes."""

from __future__ import annotations

from collections import deque
from typing import Final

from muxkit._errors import LocalProtocolError
from muxkit.core import NO_QUEUE, Buffer, Credit, Reason, queue_of
from muxkit.core.events import Writable
from muxkit.core.halves import Sender
from muxkit.protocols.yamux.config import INITIAL_WINDOW
from muxkit.protocols.yamux.frames import DATA, FIN, HEADER_SIZE, U32_MAX, WINDOW_UPDATE, encode_header
from muxkit.protocols.yamux.messages import PREFIX, PREFIX_SIZE, encode_opening
from muxkit.protocols.yamux.state import State, Stream

OVERHEAD: Final = 16
"""Bytes that each queued item counts in the outbox in addition to its own, for the objects around it."""
JOIN_BELOW: Final = 4 * 1024
"""Messages below this size are copied behind their prefix: one object in the queue is then cheaper than two."""


class StreamSender(Sender):
    """Sends bytes, or messages with a prefix, as far as the peer's credit goes."""

    __slots__ = (
        "_begun",
        "_counted",
        "_credit",
        "_queue",
        "_state",
        "_wanted",
        "carries_messages",
        "deficit",
        "is_confirmed",
        "is_ended",
        "is_ending",
        "owner",
        "queued",
        "scheduled",
        "stream",
    )

    def __init__(self, state: State, stream: Stream, *, carries_messages: bool) -> None:
        self.owner: object | None = None
        self.stream: Stream = stream
        self.carries_messages: bool = carries_messages
        self.queued: int = 0
        self.is_ending: bool = False
        """True once `finish` or `cancel` was called: nothing more may be queued."""
        self.is_ended: bool = False
        """True once the FIN was written."""
        self.is_confirmed: bool = False
        """True once the peer has processed the FIN, or the stream was reset."""
        self.deficit: int = 0
        self.scheduled: bool = False
        self._state = state
        self._credit = Credit(INITIAL_WINDOW)
        self._queue: deque[bytes] = NO_QUEUE
        self._begun = 0  # bytes of the first item that were written
        self._counted = 0  # bytes that this half counts in the outbox
        self._wanted: int | None = None  # bytes that a task waits for

    @property
    def label(self) -> str:
        return self.stream.label

    @property
    def credit_out(self) -> int:
        return self._credit.available

    @property
    def has_sent(self) -> bool:
        return not self.stream.is_ours or not self.stream.flags

    # --- commands

    def check_size(self, size: int) -> None:
        largest = self._state.limits.message
        if self.carries_messages and size > largest:
            raise LocalProtocolError(
                f"message too large: expected at most {largest} bytes, got {size}; raise Limits(message=…) on both "
                "sides or send it in parts"
            )

    def has_room(self, size: int) -> bool:
        # A message that is larger than the window may go while nothing else is queued; it is written in pieces.
        room = self._credit.available - self.queued
        return room >= size + PREFIX_SIZE or (not self.queued and room > 0)

    def notify_when_room(self, size: int) -> None:
        self._wanted = size

    def send(self, message: bytes) -> None:
        size = len(message)
        if self.carries_messages:
            self.check_size(size)
            self._state.messages_sent += 1
            if size < JOIN_BELOW:
                self._push(PREFIX.pack(size) + message)
            else:
                self._push(PREFIX.pack(size))
                self._push(message)
        elif size:
            self._push(message)

    def try_send(self, message: bytes) -> bool | None:
        if not self.has_room(len(message)):
            return None
        is_first = not self.scheduled
        self.send(message)
        return is_first

    def send_opening(self, opening: bytes) -> None:
        """Queue the first record of a channel."""
        self._push(encode_opening(opening))

    def finish(self, payload: bytes = b"") -> None:
        if payload:
            raise LocalProtocolError("the end of a yamux stream carries no payload; send it as a message before")
        if not self.is_ending:
            self.is_ending = True
            if self.stream.reset is None and not self.stream.is_gone:
                self._state.scheduler.add(self)

    def cancel(self, reason: Reason) -> None:
        self.is_ending = True
        self._state.reset(self.stream, reason)

    # --- for the engine

    def granted(self, amount: int) -> None:
        """The peer gave more credit."""
        self._credit.grant(amount, cap=U32_MAX)
        self._count()
        if self._queue:
            self._state.scheduler.add(self)
        self._notify()

    def was_confirmed(self) -> None:
        """The peer has processed the FIN."""
        self.is_confirmed = True
        if not self.stream.is_gone:
            if self.stream.receiver.is_stopped:
                self._state.closed(self.stream)
            self._state.remove_if_final(self.stream)

    def drop_all(self) -> None:
        """Drop everything that is queued: the stream was reset."""
        self.is_ending = self.is_ended = self.is_confirmed = True
        self._queue = NO_QUEUE
        self.queued = self._begun = 0
        self._count()

    # --- writing, as the scheduler's source

    def is_ready(self) -> bool:
        """Return True if `write` would write anything."""
        if self._queue:
            return self._credit.available > 0
        return self.is_ending and not self.is_ended

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        """Write data frames of about `budget` bytes, then the FIN if it is next; return their size."""
        written = 0
        while written < budget and self.is_ready():
            written += self._write_frame(budget - written, out)
        if not self._queue:
            self._queue = NO_QUEUE
        self._count()
        if self._wanted is not None:
            self._notify()
        return written

    def _write_frame(self, budget: int, out: list[Buffer]) -> int:
        """Write one frame, with as many items of the queue as fit into it."""
        most = min(budget, self._state.config.frame, self._credit.available)
        queue, body, size = self._queue, len(out), 0
        out.append(b"")  # the header, once the size is known
        while queue and size < most:
            item = queue[0]
            left = len(item) - self._begun
            if left <= most - size:
                out.append(memoryview(item)[self._begun :] if self._begun else item)
                queue.popleft()
                self._begun = 0
            else:
                left = most - size
                out.append(memoryview(item)[self._begun : self._begun + left])
                self._begun += left
            size += left
        flags, self.stream.flags = self.stream.flags, 0
        if self.is_ending and not queue:
            flags |= FIN
            self.is_ended = True
            self._state.control.unconfirmed.append(self)
        if size:
            out[body] = encode_header(DATA, flags, self.stream.id, size)
        else:
            grant, self.stream.grant = self.stream.grant, 0
            out[body] = encode_header(WINDOW_UPDATE, flags, self.stream.id, grant)
        self._credit.available -= size
        self.queued -= size
        return HEADER_SIZE + size

    # --- inside

    def _push(self, item: bytes) -> None:
        self._queue = queue_of(self._queue)
        self._queue.append(item)
        self.queued += len(item)
        self._count()
        if self._credit.available:
            self._state.scheduler.add(self)

    def _count(self) -> None:
        """Count in the outbox what waits only for the transport: the queued bytes that credit covers."""
        counted = min(self.queued, self._credit.available) + OVERHEAD * len(self._queue)
        self._state.outbox.used += counted - self._counted
        self._counted = counted

    def _notify(self) -> None:
        if self._wanted is not None and self.has_room(self._wanted):
            self._wanted = None
            self._state.events.append(Writable(self))
