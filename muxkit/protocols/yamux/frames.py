"""Encoding of yamux frames. These functions know nothing about the state of a connection.

A frame consists of a header of twelve bytes and, for data frames, a payload:

    version  1 byte    always 0
    type     1 byte    data, window update, ping, go away
    flags    2 bytes   SYN, ACK, FIN, RST
    stream   4 bytes   the id of the stream; 0 stands for the session
    length   4 bytes   data: the size of the payload that follows; window update: the credit; ping: an opaque value;
                       go away: the code

All numbers are big-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Final

from muxkit._observer import Direction, Observer
from muxkit.core import Buffer

HEADER: Final = Struct(">BBHII")
HEADER_SIZE: Final = 12
SESSION: Final = 0
"""The stream id of frames that concern the whole session: pings and go-aways."""
U32_MAX: Final = 2**32 - 1


# Types and flags are plain integers, because comparing members of an enum takes several times as long.


class Type:
    """The types of frames."""

    DATA: Final = 0
    WINDOW_UPDATE: Final = 1
    PING: Final = 2
    GO_AWAY: Final = 3


class Flag:
    """The flags of frames. A frame can carry several of them."""

    SYN: Final = 1
    ACK: Final = 2
    FIN: Final = 4
    RST: Final = 8


class Code(IntEnum):
    """The reasons for the end of a session. A go-away frame carries the code in its length field."""

    NORMAL = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2


TYPE_NAMES: Final = ("data", "window-update", "ping", "go-away")
FLAG_NAMES: Final = ((Flag.SYN, "syn"), (Flag.ACK, "ack"), (Flag.FIN, "fin"), (Flag.RST, "rst"))


def encode_header(type: int, flags: int, stream: int, length: int) -> bytes:
    """Encode the header of a frame."""
    return HEADER.pack(0, type, flags, stream, length)


# --- tracing


def observe_frame(observer: Observer, direction: Direction, type: int, flags: int, stream: int, length: int) -> None:
    """Report one frame to an observer. The name consists of the frame's type and flags."""
    channel = f"stream {stream}" if stream else "session"
    name = " ".join([TYPE_NAMES[type], *[name for flag, name in FLAG_NAMES if flags & flag]])
    observer.frame(direction, channel, name, length if type == Type.DATA else 0)
    if type == Type.WINDOW_UPDATE and length:
        observer.credit(direction, channel, length)


def observe_written(observer: Observer, buffers: Sequence[Buffer]) -> None:
    """Report written frames to an observer.

    The frames are parsed again for that, so that writing costs nothing extra without an observer.
    """
    data = b"".join(buffers)
    position = 0
    while position < len(data):
        _version, type, flags, stream, length = HEADER.unpack_from(data, position)
        position += HEADER_SIZE + (length if type == Type.DATA else 0)
        observe_frame(observer, "out", type, flags, stream, length)
