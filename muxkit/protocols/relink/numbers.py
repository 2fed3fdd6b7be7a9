"""Sequence numbers: find the message that an acknowledgement or a decision refers to, and store runs of decisions.

On the wire a sequence number has 32 bits and wraps. Inside the engine the numbers don't wrap. The first message of a
channel has the number `Config.first_sequence`, and each further message has the next higher number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.core import serial_add, serial_distance
from muxkit.protocols.relink.frames import Ack, Operation


@attrs.define
class Run:
    """Equal decisions or answers for consecutive messages, up to number `through`.

    The run begins with the message after the previous run.
    """

    kind: Operation | Ack
    through: int


def extend(runs: deque[Run], kind: Operation | Ack, through: int) -> bool:
    """Extend the last run if it has the same kind. Otherwise append a new run and return True."""
    if runs and runs[-1].kind is kind:
        runs[-1].through = through
        return False
    runs.append(Run(kind, through))
    return True


def counts_of(channels: Sequence[int]) -> dict[int, int]:
    """Count how often a packet names each channel."""
    return {channels[0]: 1} if len(channels) == 1 else Counter(channels)


def resolve(what: str, wire: int, *, done: int, last: int, behind: int = 0) -> int | None:
    """Convert the 32-bit number `wire` to an internal number from `done` to `last`.

    Args:
        what: A description of the packet, for errors.
        wire: The number in the packet.
        done: The number that the previous packet of this kind referred to.
        last: The highest number that a packet can refer to now.
        behind: How many numbers before `done` the peer may repeat.

    Returns:
        The internal number, or None if `wire` is one of the `behind` numbers before `done`.

    Raises:
        RemoteProtocolError: `wire` is any other number.
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
    """Return the internal number that `steps` packets without a sequence number refer to, counted from `done`.

    Raises:
        RemoteProtocolError: The number would be higher than `last`.
    """
    if done + steps > last:
        was, most = serial_add(done, 0), serial_add(last, 0)
        raise RemoteProtocolError(
            f"{what}: {steps} more after {was}, and {most} is the last that can be meant", rule="relink-O12"
        )
    return done + steps
