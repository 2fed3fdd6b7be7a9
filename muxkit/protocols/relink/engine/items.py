"""What stands in the queues of a channel? Messages as they will be written, decisions, and answers to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from muxkit.protocols.relink._packets import OVERHEAD, PADDING, PART_OVERHEAD, message_buffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.core import Buffer
    from muxkit.protocols.relink._outgoing import Outgoing
    from muxkit.protocols.relink._packets import Ack, Operation

JOIN_MOST: Final = 2048  # bytes of payload up to which a packet is put together when it is queued


class Large:
    """A message whose payloads are not copied, or that has several."""

    __slots__ = ("buffers", "cost", "size")

    def __init__(self, buffers: list[Buffer], size: int, cost: int) -> None:
        self.buffers = buffers
        self.size = size  # of all of them
        self.cost = cost  # in the window

    @classmethod
    def of_one(cls, head: bytes, payload: bytes) -> Large:
        """A message with one part, whose head is known."""
        buffers: list[Buffer] = [head, payload]
        if len(payload) & 7:
            buffers.append(PADDING[len(payload) & 7])
        size = len(head) + (len(payload) + 7 & -8)
        return cls(buffers, size, size + OVERHEAD)

    @classmethod
    def of_parts(cls, channel: int, parts: Sequence[bytes], id_size: int) -> Large:
        """A message with any number of them; put together if it is small."""
        buffers = message_buffers((channel,), parts, id_size)
        size = sum(map(len, buffers))
        cost = size + OVERHEAD + PART_OVERHEAD * max(0, len(parts) - 1)
        return cls(buffers if cost > JOIN_MOST else [b"".join(buffers)], size, cost)

    def __len__(self) -> int:
        return self.size


class Multicast:
    """A message to several channels, in the queue of each: written when it is the next one in all of them."""

    __slots__ = ("cost", "counts", "parts", "size", "waiting", "written")

    def __init__(self, counts: dict[Outgoing, int], parts: tuple[bytes, ...], size: int, cost: int) -> None:
        self.counts = counts  # how often it goes to each channel, which may be named twice
        self.parts = parts
        self.size = size  # as a packet to one channel
        self.cost = cost  # in the window of one
        self.waiting = len(counts)  # channels in which something else is still before it
        self.written = False  # as one packet; again it is written to each channel that lacks it

    def __len__(self) -> int:
        return self.size


Item = bytes | Large | Multicast  # bytes are a packet with one small part, and cost `OVERHEAD` beside it


@attrs.define
class Decision:
    """Commits, or rollbacks, through a number; where it begins, the one before it ends."""

    operation: Operation
    through: int


@attrs.define
class Run:
    """Numbers up to and including `through`, with one answer."""

    ack: Ack
    through: int


@attrs.define
class Span:
    """Committed messages, first to last, that are not answered yet."""

    first: int
    last: int
