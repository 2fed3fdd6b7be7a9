"""Presence: who is subscribed to a topic, and who joins and leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from muxkit.codecs import Json
from muxkit.core import printable

if TYPE_CHECKING:
    from muxkit.runtime import Channel

MAX_NAME = 64  # characters of the name that a subscriber gives itself


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """A subscriber of a topic."""

    id: int
    """A number of its own: the same person may be there twice."""
    name: str = ""
    """The name that the subscriber gave as `member=`. Nobody has checked it."""
    user: str | None = None
    """The name that `authorize=` of the server returned for it."""


class Presence(msgspec.Struct, frozen=True):
    """Somebody is there, or has left."""

    member: Member
    is_here: bool


PRESENCE_CODEC: Json[Presence] = Json(Presence)


def member_of(channel: Channel, id: int, name: str) -> Member:
    """Return the subscriber that opened a channel."""
    return Member(id, printable(name, MAX_NAME), channel.session.info.user)
