"""Did this channel arrive? Pending until the message that carried it was acked, then accessible or lost for good.

Section 3.6 of the document is empty; READING.md has the rule. A channel becomes accessible when its message is acked
on an accessible channel, and is lost when that message is nacked or the channel that it went on is lost.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Fate(Enum):
    PENDING = "pending"
    ACCESSIBLE = "accessible"
    LOST = "lost"


class Transit:
    """One channel's way to the other side.

    While the message was acked but its own channel is pending, it hangs below that channel's node. A channel that
    is gone leaves its node standing only while it joins two or more others, so a tree is no larger than what lives.
    """

    __slots__ = ("alive", "below", "channel", "fate", "ours", "parent")

    def __init__(self, channel: int | None, *, ours: bool, fate: Fate = Fate.PENDING) -> None:
        self.channel = channel
        self.ours = ours
        self.fate = fate
        self.alive = True
        self.parent: Transit | None = None
        self.below: dict[Transit, None] = {}

    def carried_by(self, carrier: Transit) -> list[Transit]:
        """The message that this channel was attached to has arrived on `carrier`. Gives nodes of ours that are lost."""
        if self.fate is not Fate.PENDING or self.parent is not None or self is carrier:
            return []
        if carrier.fate is Fate.ACCESSIBLE:
            self._arrive()
        elif carrier.fate is Fate.LOST:
            return lose([self])
        else:
            self.parent = carrier
            carrier.below[self] = None
            self._prune()
        return []

    def ended(self) -> None:
        """The channel is gone."""
        self.alive = False
        self._prune()

    def _arrive(self) -> None:
        line = [self]
        while line:
            node = line.pop()
            node.fate, node.parent = Fate.ACCESSIBLE, None
            line += node.below
            node.below.clear()

    def _prune(self) -> None:
        node = self
        while not node.alive and (parent := node.parent) is not None and len(node.below) <= 1:
            del parent.below[node]
            node.parent = None
            if node.below:
                (child,) = node.below
                node.below.clear()
                child.parent = parent
                parent.below[child] = None
                return
            node = parent


def lose(nodes: Iterable[Transit]) -> list[Transit]:
    """These did not arrive, nor did what was sent on them. Gives all nodes of ours that are lost now.

    What hangs below and was made by the peer is left to him: he forgets it himself.
    """
    lost, line = [], [*nodes]
    for node in line:  # which grows meanwhile
        if node.fate is not Fate.PENDING:
            continue
        if node.parent is not None:
            node.parent.below.pop(node, None)
            node.parent = None
        below = [*node.below]
        for child in below:
            child.parent = None
        node.below.clear()
        node.fate = Fate.LOST
        if node.ours:
            lost.append(node)
        line += [child for child in below if child.ours]
    return lost
