"""What is missing, and how much room is left? The delta coding of `miss`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from muxkit._errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LISTED_MOST = 256  # deltas that we send at most; a longer list may have been cut, and does not tell what arrived


@attrs.define
class Miss:
    """A `miss` array, understood."""

    missing: list[int]
    """The seqs to send again, rising."""
    limit: int
    """The highest seq that is accepted now (the document calls it both that and the first that is not)."""
    window: int
    """How far that is ahead of the ack; it stays that far as the ack moves."""


def encode_miss(ack: int, missing: Iterable[int], capacity: int | None = None, *, most: int | None = None) -> list[int]:
    """The deltas for what is missing above `ack`, then one for the limit: `ack + capacity`, itself still accepted.

    At most `most` deltas; what does not fit is left out, which tells the peer nothing about it.
    """
    limit = None if capacity is None else ack + capacity
    listed = sorted(missing)
    if limit is not None:
        listed = [seq for seq in listed if seq < limit]
    if most is not None:
        del listed[max(0, most - 1) :]
    if limit is not None:
        listed.append(limit)
    deltas = []
    previous = ack
    for seq in listed:
        deltas.append(seq - previous)
        previous = seq
    return deltas


def decode_miss(ack: int, deltas: Sequence[int]) -> Miss:
    """The inverse; an empty array, or a delta below 1, is a `RemoteProtocolError`."""
    if not deltas:
        raise RemoteProtocolError("miss is empty", rule="e3x-M03")
    seqs = []
    seq = ack
    for delta in deltas:
        if delta < 1:
            raise RemoteProtocolError(f"{delta} among the deltas of miss, 1 or more are allowed", rule="e3x-M03")
        seq += delta
        seqs.append(seq)
    limit = seqs.pop()
    return Miss(seqs, limit, limit - ack)
