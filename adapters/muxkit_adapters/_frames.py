"""Frames of a WebSocket that carries bytes (RFC 6455, section 5): a reader with limits, and functions that write them.

The byte stream is the payload of binary messages. How the bytes are divided into messages has no meaning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from wsproto.frame_protocol import LOCAL_ONLY_CLOSE_REASONS, MAX_CLOSE_REASON, MAX_PROTOCOL_CLOSE_REASON, CloseReason

from ._masking import masked

# The largest message that we send. With the 8 bytes in front of a masked one, it fills four records of TLS.
PIECE_SIZE = 65_528  # bytes
FRAGMENTS_MOST = 1024  # frames per message
FRAMES_AT_ONCE = 128  # frames to read per call, because parsing a tiny frame takes far longer than its size suggests
CONTROL_MOST = 125  # bytes of a control frame's payload
CLOSE_TEXT_MOST = CONTROL_MOST - 2

CONTINUATION, TEXT, BINARY, CONTROL, CLOSE, PING, PONG = 0, 1, 2, 8, 8, 9, 10  # opcodes; control frames are from 8 on
FINAL, RESERVED, MASKED = 0x80, 0x70, 0x80

Buffers = Sequence[bytes | memoryview]


class Violation(Exception):
    """Raised when the peer broke a rule or exceeded a limit. `code` is for the close frame that reports it."""

    def __init__(self, text: str, code: int = CloseReason.PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code: int = code


class FrameReader:
    """Reads the frames of one direction. `is_masked` is True for the frames of a client.

    `take` returns payload as it arrives, even of incomplete frames. Pings and close frames are put into `controls`.
    """

    def __init__(self, *, is_masked: bool, message_most: int) -> None:
        self._is_masked = is_masked
        self._message_most = message_most
        self._data = b""  # received bytes
        self._at = 0  # position of the first byte that wasn't processed
        self._left = 0  # missing payload bytes of the current data frame
        self._key = b""  # masking key of that payload, rotated for the next byte
        self._size = 0  # bytes of the current message so far
        self._fragments = 0
        self._is_inside = False  # a message has begun, and its last frame hasn't arrived
        self.controls: list[tuple[int, bytes]] = []
        """Pings and the close frame, as opcode and payload. The caller removes them."""
        self.may_hold_more: bool = False
        """True if the last `take` stopped although it could have read more."""
        self.is_closed: bool = False
        """True after a close frame. Bytes after it are ignored."""

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def take(self, most: int) -> bytes:
        """Return at most `most` bytes of payload that have arrived.

        Raises:
            Violation: if the peer broke a rule or exceeded a limit.
        """
        data, at, end = self._data, self._at, len(self._data)
        view = memoryview(data)
        pieces: list[bytes] = []
        frames = 0
        self.may_hold_more = False
        while at < end and not self.is_closed:
            if self._left:
                size = min(self._left, end - at, most)
                if not size:
                    self.may_hold_more = True
                    break
                if self._is_masked:
                    pieces.append(masked(view[at : at + size], self._key))
                    turned = size & 3
                    self._key = self._key[turned:] + self._key[:turned]
                else:
                    pieces.append(data[at : at + size])
                at += size
                most -= size
                self._left -= size
                continue
            if frames == FRAMES_AT_ONCE:
                self.may_hold_more = True
                break
            start = self._begin_frame(data, at, end)
            if start is None:
                break
            at = start
            frames += 1
        self._at = at
        if at == end:
            self._data, self._at = b"", 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _begin_frame(self, data: bytes, at: int, end: int) -> int | None:
        """Read the header at `at`, and the whole frame if it is a control frame. Return None if bytes are missing."""
        if end - at < 2:
            return None
        first, second = data[at], data[at + 1]
        opcode, size, start = first & 0x0F, second & 0x7F, at + 2
        if first & RESERVED:
            raise Violation("a reserved bit is set, although no extension was agreed on")
        if bool(second & MASKED) is not self._is_masked:
            raise Violation("a client's frame is not masked" if self._is_masked else "a server's frame is masked")
        if size > CONTROL_MOST:
            width = 2 if size == 126 else 8
            if end < start + width:
                return None
            size, start = int.from_bytes(data[start : start + width], "big"), start + width
            if size <= CONTROL_MOST or (width == 8 and size < 65_536):
                raise Violation(f"a size of {size} written in {width} bytes")
        self._check(opcode, bool(first & FINAL), size)
        if self._is_masked:
            start += 4
        if opcode < CONTROL:
            if end < start:
                return None
            self._count(opcode, bool(first & FINAL), size)
            self._left, self._key = size, data[start - 4 : start] if self._is_masked else b""
            return start
        if end < start + size:
            return None
        payload = data[start : start + size]
        self._control(opcode, masked(payload, data[start - 4 : start]) if self._is_masked else payload)
        return start + size

    def _check(self, opcode: int, is_final: bool, size: int) -> None:
        """Check a header. The same header is checked again if its frame was incomplete."""
        if opcode >= CONTROL:
            if opcode > PONG:
                raise Violation(f"a frame of the unknown kind {opcode:#x}")
            if size > CONTROL_MOST:
                raise Violation(f"a control frame of {size} bytes, where {CONTROL_MOST} are allowed")
            if not is_final:
                raise Violation("a control frame in fragments")
            return
        if opcode == TEXT:
            text = "a text frame came; only binary messages carry this byte stream"
            raise Violation(text, CloseReason.UNSUPPORTED_DATA)
        if opcode > BINARY:
            raise Violation(f"a frame of the unknown kind {opcode:#x}")
        if self._is_inside is not (opcode == CONTINUATION):
            raise Violation(
                "a message within another" if self._is_inside else "the rest of a message that has not begun"
            )
        if self._size + size > self._message_most:
            text = f"a message of {self._size + size} bytes or more, against message_most={self._message_most}"
            raise Violation(text, CloseReason.MESSAGE_TOO_BIG)
        if self._fragments >= FRAGMENTS_MOST:
            raise Violation(f"a message in more than {FRAGMENTS_MOST} fragments", CloseReason.POLICY_VIOLATION)

    def _count(self, opcode: int, is_final: bool, size: int) -> None:
        self._is_inside = not is_final
        if is_final:
            self._size = self._fragments = 0
        else:
            self._size += size
            self._fragments += 1

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == PONG:
            return
        self.controls.append((opcode, payload))
        self.is_closed = opcode == CLOSE


def read_close(payload: bytes) -> tuple[int, str]:
    """Parse the payload of a close frame into code and text. Raises `Violation` if it is invalid."""
    if not payload:
        return CloseReason.NO_STATUS_RCVD, ""
    if len(payload) == 1:
        raise Violation("a close frame of 1 byte")
    code = int.from_bytes(payload[:2], "big")
    is_known = code > MAX_PROTOCOL_CLOSE_REASON or code in CloseReason.__members__.values()
    if not (CloseReason.NORMAL_CLOSURE <= code <= MAX_CLOSE_REASON and is_known) or code in LOCAL_ONLY_CLOSE_REASONS:
        raise Violation(f"a close frame with the code {code}, which cannot be sent")
    try:
        return code, payload[2:].decode()
    except UnicodeDecodeError:
        raise Violation("the text of a close frame is not UTF-8", CloseReason.INVALID_FRAME_PAYLOAD_DATA) from None


def control_frame(opcode: int, payload: bytes, *, is_masked: bool) -> bytes:
    """Return a control frame."""
    head = bytes((FINAL | opcode, len(payload) | (MASKED if is_masked else 0)))
    if not is_masked:
        return head + payload
    key = os.urandom(4)
    return head + key + masked(payload, key)


def close_payload(code: int, text: str) -> bytes:
    """Return the payload of a close frame. Text that is too long is cut."""
    if code == CloseReason.NO_STATUS_RCVD:
        return b""
    cut = text.encode()[:CLOSE_TEXT_MOST].decode(errors="ignore")
    return code.to_bytes(2, "big") + cut.encode()


def data_frames(buffers: Buffers, *, is_masked: bool) -> list[bytes | memoryview]:
    """Put bytes into binary messages of one frame each. Without a mask, the bytes aren't copied."""
    total = sum(map(len, buffers))
    if is_masked:
        data = memoryview(buffers[0] if len(buffers) == 1 else b"".join(buffers))
        frames: list[bytes | memoryview] = []
        for begin in range(0, total, PIECE_SIZE):
            key = os.urandom(4)
            piece = data[begin : begin + PIECE_SIZE]
            frames += (_head(len(piece), MASKED) + key, masked(piece, key))
        return frames
    frames = []
    room = 0  # in the current frame
    for buffer in buffers:
        rest = buffer
        while size := len(rest):
            if not room:
                room = min(total, PIECE_SIZE)
                total -= room
                frames.append(_head(room, 0))
            if size <= room:
                frames.append(rest)
                room -= size
                break
            view = memoryview(rest)
            frames.append(view[:room])
            rest, room = view[room:], 0
    return frames


def _head(size: int, mask: int) -> bytes:
    if size <= CONTROL_MOST:
        return bytes((FINAL | BINARY, mask | size))
    if size < 65_536:
        return bytes((FINAL | BINARY, mask | 126)) + size.to_bytes(2, "big")
    return bytes((FINAL | BINARY, mask | 127)) + size.to_bytes(8, "big")
