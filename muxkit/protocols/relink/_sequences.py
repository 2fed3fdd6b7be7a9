"""Which message is meant? Numbers have 32 bits on the wire and wrap; inside they are plain integers and do not."""

from __future__ import annotations

from muxkit._errors import RemoteProtocolError
from muxkit.core import serial_add, serial_distance


def resolve(what: str, wire: int, *, done: int, last: int, behind: int = 0) -> int | None:
    """The number from `done` to `last` that `wire` stands for.

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
    """The number that is meant by so many packets without one."""
    if done + steps > last:
        was, most = serial_add(done, 0), serial_add(last, 0)
        raise RemoteProtocolError(
            f"{what}: {steps} more after {was}, and {most} is the last that can be meant", rule="relink-O12"
        )
    return done + steps
