"""What does a channel id say? Who made the channel, who sends on it, whether it is oneshot, and its index."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from muxkit._errors import LocalProtocolError
from muxkit.core import Ids

ENTRYPOINT: Final = 0
MOST_INDEX: Final = 2**61 - 1


class Role(IntEnum):
    """The two ends of a connection; the value is the bit that stands for it in a channel id."""

    CLIENT = 0
    SERVER = 1

    @property
    def peer(self) -> Role:
        return Role(1 - self)


def channel_id(*, creator: Role, sender: Role, oneshot: bool, index: int) -> int:
    if not 0 <= index <= MOST_INDEX:
        raise LocalProtocolError(f"index {index:#x} is outside 0 … {MOST_INDEX:#x}")
    return index << 3 | oneshot << 2 | sender << 1 | creator


def creator_of(channel: int) -> int:
    return channel & 1


def sender_of(channel: int) -> int:
    return channel >> 1 & 1


def is_oneshot(channel: int) -> bool:
    return bool(channel & 4)


def index_of(channel: int) -> int:
    return channel >> 3


def label(channel: int) -> str:
    """For people: `client-made server-sends 7`."""
    if channel == ENTRYPOINT:
        return "entrypoint"
    creator, sender = Role(creator_of(channel)).name.lower(), Role(sender_of(channel)).name.lower()
    return f"{creator}-made {sender}-sends{' oneshot' if is_oneshot(channel) else ''} {index_of(channel)}"


def spaces(creator: Role) -> dict[int, Ids]:
    """The four counters of one creator, by the low three bits; the entrypoint has taken index 0 of its space."""
    counters = {}
    for bits in range(creator, 8, 2):
        first = 8 if bits == ENTRYPOINT else bits
        counters[bits] = Ids(first, MOST_INDEX << 3 | bits, step=8)
    return counters
