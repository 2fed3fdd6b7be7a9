"""What does an observer see of the packets? Each by its name, with the channel that it concerns."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from muxkit.core import Cursor
from muxkit.protocols.relink._frames import Bounds, parse_packet
from muxkit.protocols.relink._packets import AckPacket, General, MessagePacket, OperationPacket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._observer import Observer
    from muxkit.core import Buffer


def observe_written(observer: Observer, buffers: Sequence[Buffer], bounds: Bounds) -> None:
    """Packets that are about to be written; parsed again, so that writing them costs nothing without an observer.

    `bounds` are those of what comes in.
    """
    turned = Bounds(bounds.ack_id_size, bounds.id_size, 2**32, 2**32, 2**64)
    cursor = Cursor(b"".join(buffers))
    while cursor.remaining:
        packet = parse_packet(cursor, turned)
        match packet:
            case General():
                observer.frame("out", "link", packet.name.lower(), 0)
            case OperationPacket():
                for channel in packet.channels:
                    observer.frame("out", f"out {channel}", packet.operation.name.lower(), 0)
            case AckPacket():
                for channel in packet.channels:
                    observer.frame("out", f"in {channel}", packet.ack.name.lower(), 0)
            case MessagePacket():
                size = sum(map(len, packet.parts))
                for channel in packet.channels:
                    observer.frame("out", f"out {channel}", "message", size)
            case _:
                assert_never(packet)
