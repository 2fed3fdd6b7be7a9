"""Sequence numbers: which message an acknowledgement or a decision means, and runs of equal answers.

On the wire a message has a number of 32 bits, which wraps. Inside the engine numbers never wrap: they begin with
`Config.first_sequence` and grow by one with each message since the channel was opened.
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
    """A run of equal decisions or answers through a number. It begins behind the run before it."""

    kind: Operation | Ack
    through: int


def extend(runs: deque[Run], kind: Operation | Ack, through: int) -> bool:
    """Extend the last run if it is of this kind, or begin another run. Return True for another run."""
    if runs and runs[-1].kind is kind:
        runs[-1].through = through
        return False
    runs.append(Run(kind, through))
    return True


def counts_of(channels: Sequence[int]) -> dict[int, int]:
    """Count how often a packet names each channel."""
    return {channels[0]: 1} if len(channels) == 1 else Counter(channels)


def resolve(what: str, wire: int, *, done: int, last: int, behind: int = 0) -> int | None:
    """Return the number from `done` to `last` that the 32-bit number `wire` stands for.

    `done` is the last number that was meant before, and `last` is the last that can be meant now. Returns None for one
    of the `behind` numbers before `done`, which a peer may repeat. Raises `RemoteProtocolError` for any other number.
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
    """Return the number that `steps` acknowledgements without a sequence number lead to."""
    if done + steps > last:
        was, most = serial_add(done, 0), serial_add(last, 0)
        raise RemoteProtocolError(
            f"{what}: {steps} more after {was}, and {most} is the last that can be meant", rule="relink-O12"
        )
    return done + steps
