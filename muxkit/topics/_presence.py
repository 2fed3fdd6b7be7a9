"""The members of a topic, and the updates about members that join and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from muxkit.codecs import Json
from muxkit.core import printable

if TYPE_CHECKING:
    from muxkit.runtime import Channel

MAX_NAME = 64  # maximum number of characters of a member's name; longer names are truncated


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """A subscriber that has given a name, or that the server has authenticated."""

    id: int
    """A number that no other member of the topic has. The same user may be a member several times."""
    name: str = ""
    """The name that the subscriber gave as `member=`. The server hasn't verified it."""
    user: str | None = None
    """The name that the server's `authorize=` returned, or None."""


class Presence(msgspec.Struct, frozen=True):
    """An update of `Topic.presence`."""

    member: Member
    """The member that the update is about."""
    is_here: bool
    """True if the member is there or joins, and False if it leaves."""


PRESENCE_CODEC: Json[Presence] = Json(Presence)


def member_of(channel: Channel, id: int, name: str) -> Member:
    """Return the member for a subscriber's channel."""
    return Member(id, printable(name, MAX_NAME), channel.session.info.user)
