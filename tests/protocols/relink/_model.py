"""A model of a link in plain lists: the messages of each life of each channel, and what became of them."""

from __future__ import annotations

import attrs


@attrs.define
class Sent:
    """One message as its sender sees it."""

    parts: tuple[bytes, ...]
    decision: str = ""  # "commit" or "rollback"
    given: bool = False  # to the other application
    consumed: bool = False
    reply: str = ""  # of the other application
    answer: str = ""  # as the sender was told


@attrs.define
class Life:
    """A channel from one opening to its end."""

    messages: list[Sent] = attrs.Factory(list)
    closing: bool = False
    opened: bool = False  # the receiver was told
    ended: bool = False  # the receiver was told
    closed: bool = False  # the sender was told

    @property
    def undecided(self) -> int:
        return sum(not message.decision for message in self.messages)
