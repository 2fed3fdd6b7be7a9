"""The small records of channels: queued messages, decisions, answers, sequence numbers, timers."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.core import serial_add, serial_distance
from muxkit.protocols.relink.frames import OVERHEAD, PADDING, PART_OVERHEAD, message_buffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.core import Buffer
    from muxkit.protocols.relink.frames import Ack, Operation


JOIN_MOST: Final = 2048  # bytes of payload up to which a packet is put together when it is queued


class Large:
    """A queued message with several parts, or with one that is too large to copy."""

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


@attrs.define
class Decision:
    """A run of commits or rollbacks through a number; it begins behind the run before it."""

    operation: Operation
    through: int


@attrs.define
class Run:
    """A run of equal answers through a number; it begins behind the run before it."""

    ack: Ack
    through: int


@attrs.define
class Span:
    """A range of committed messages that the application has not answered."""

    first: int
    last: int


def resolve(what: str, wire: int, *, done: int, last: int, behind: int = 0) -> int | None:
    """Return the number from `done` to `last` that the 32-bit `wire` stands for.

    `done` is the last that was meant before, `last` the last that can be meant now. None if it is one of the
    `behind` numbers before `done`; whatever is left is a violation.
    """
    ahead = serial_distance(done % 2**32, wire)
    if ahead <= last - done:
        return done + ahead
    back = serial_distance(wire, done % 2**32)
    if back <= behind:
        return None
    if back < ahead:
        raise RemoteProtocolError(f"{what}: {wire} came after {serial_add(done, 0)}", rule="relink-Q11")
    last_wire = serial_add(last, 0)
    raise RemoteProtocolError(f"{what}: {wire} is beyond {last_wire}, the last that can be meant", rule="relink-Q11")


def advance(what: str, steps: int, *, done: int, last: int) -> int:
    """Return the number that `steps` acks without a sequence number lead to."""
    if done + steps > last:
        was, most = serial_add(done, 0), serial_add(last, 0)
        raise RemoteProtocolError(
            f"{what}: {steps} more after {was}, and {most} is the last that can be meant", rule="relink-O12"
        )
    return done + steps


class Timer(Enum):
    """The deadlines of a connection."""

    ACKS = "acks"
    """When to tell what was received and consumed."""
    KEEPALIVE = "keepalive"
    """When to ping because nothing came for a while."""
    ANSWER = "answer"
    """When to give up on a connection that is silent after that ping."""
    STALL = "stall"
    """When to look whether an unfinished packet made progress."""

    __hash__ = object.__hash__  # that of an enum is a call, and these are looked up with each read
