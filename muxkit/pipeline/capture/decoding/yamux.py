"""Decoding of yamux. Each frame gives a row, and each window update another one with its credit."""

from __future__ import annotations

import attrs

from muxkit import RemoteProtocolError
from muxkit._observer import Direction
from muxkit.core import Cursor
from muxkit.pipeline.capture.decoding.decoder import Decoder
from muxkit.pipeline.capture.files import Found, row
from muxkit.protocols.yamux.frames import FLAG_NAMES, HEADER, HEADER_SIZE, TYPE_NAMES, Type


@attrs.define
class YamuxDecoder(Decoder):
    """Decodes both directions of one connection, up to a gap. After a gap, yamux frames can't be recognized."""

    def parse(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        version, type, flags, stream, length = HEADER.unpack(cursor.exact(HEADER_SIZE))
        if version or type > Type.GO_AWAY:
            raise RemoteProtocolError(
                f"not a yamux frame: expected version 0 and a type from 0 to 3, got version {version} and type {type}",
                rule="yamux-H02" if version else "yamux-H03",
            )
        size = length if type == Type.DATA else 0
        cursor.exact(size)
        channel = f"stream {stream}" if stream else "session"
        name = " ".join([TYPE_NAMES[type], *[name for flag, name in FLAG_NAMES if flags & flag]])
        found.append(row("frame", direction, channel, name, size))
        if type == Type.WINDOW_UPDATE and length:
            found.append(row("credit", direction, channel, credit=length))
