"""The sending half of a stream, `StreamSender`: it queues bytes or messages, and writes them as data frames."""

from __future__ import annotations

from typing import Final

from muxkit._errors import LocalProtocolError
from muxkit.core import Buffer, Reason
from muxkit.core.credit_sender import CreditSender
from muxkit.core.messages import PREFIX, PREFIX_SIZE, encode_opening
from muxkit.protocols.yamux.config import INITIAL_WINDOW
from muxkit.protocols.yamux.frames import HEADER_SIZE, Flag, Type, encode_header
from muxkit.protocols.yamux.state import State, Stream

# A message below this size is copied together with its prefix, because one object in the queue is cheaper than two. For
# larger messages the copy is more expensive.
JOIN_BELOW: Final = 4 * 1024


class StreamSender(CreditSender):
    """Sends bytes, or on a channel messages with a prefix, within the peer's credit."""

    __slots__ = ("_state", "carries_messages", "is_confirmed", "is_ended", "is_ending", "stream")

    def __init__(self, state: State, stream: Stream, *, carries_messages: bool) -> None:
        super().__init__(state, INITIAL_WINDOW)
        self._state = state
        self.stream: Stream = stream
        self.carries_messages: bool = carries_messages
        self.is_ending: bool = False
        """True once `finish` was called, so that nothing more may be queued."""
        self.is_ended: bool = False
        """True once the FIN was written."""
        self.is_confirmed: bool = False
        """True once the peer has processed the FIN."""

    @property
    def label(self) -> str:
        return self.stream.label

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
        return super().has_room(size + PREFIX_SIZE)

    def send(self, message: bytes) -> None:
        size = len(message)
        if not self.carries_messages:
            if size:
                self.push(message)
            return
        self.check_size(size)
        self._state.messages_sent += 1
        if size < JOIN_BELOW:
            self.push(PREFIX.pack(size) + message)
        else:
            self.push(PREFIX.pack(size))
            self.push(message)

    def try_send_all(self, messages: list[bytes]) -> bool:
        if not self.carries_messages or max(map(len, messages)) > self._state.limits.message:
            return False
        prefixed = b"".join([part for message in messages for part in (PREFIX.pack(len(message)), message)])
        if self.queued + len(prefixed) > self.credit_out:
            return False
        self._state.messages_sent += len(messages)
        self.push(prefixed)
        return True

    def send_opening(self, opening: bytes) -> None:
        """Queue our opening record, the first record of a channel."""
        self.push(encode_opening(opening))

    def finish(self, payload: bytes = b"") -> None:
        if payload:
            raise LocalProtocolError("the end of a yamux stream carries no payload; send it as a message before")
        if not self.is_ending:
            self.is_ending = True
            self._state.scheduler.add(self)

    def cancel(self, reason: Reason) -> None:
        self._state.reset(self.stream, reason)

    # --- for the engine

    def was_confirmed(self) -> None:
        """Note that the peer has processed the FIN."""
        if not self.stream.is_gone:
            self.is_confirmed = True
            if self.stream.receiver.is_stopped:
                self._state.closed(self.stream)
            self._state.remove_if_final(self.stream)

    def drop_all(self) -> None:
        self.is_ending = self.is_ended = self.is_confirmed = True
        super().drop_all()

    # --- writing

    def is_ready(self) -> bool:
        if self.items:
            return self.credit_out > 0
        return self.is_ending and not self.is_ended

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        written, largest = 0, self._state.config.frame
        while written < budget and self.is_ready():
            written += self._write_frame(min(budget - written, largest), out) if self.items else self._write_fin(out)
        self.written()
        return written

    def _write_frame(self, most: int, out: list[Buffer]) -> int:
        """Write one data frame with up to `most` bytes of the queue."""
        stream, place = self.stream, len(out)
        out.append(b"")  # a placeholder for the header, which needs the size
        size = self.take(most, out)
        out[place] = encode_header(Type.DATA, stream.flags, stream.id, size)
        stream.flags = 0
        return HEADER_SIZE + size

    def _write_fin(self, out: list[Buffer]) -> int:
        """Write the FIN in a separate frame, and not in the last data frame.

        The implementation in Go applies the flags of a data frame before it stores the payload (hashicorp/yamux,
        `readData`). If one frame had the FIN and the last bytes, its reader could see the end of the stream before
        these bytes.
        """
        stream = self.stream
        out.append(encode_header(Type.WINDOW_UPDATE, stream.flags | Flag.FIN, stream.id, stream.grant))
        stream.flags = stream.grant = 0
        self.is_ended = True
        self._state.control.unconfirmed.append(self)
        return HEADER_SIZE
