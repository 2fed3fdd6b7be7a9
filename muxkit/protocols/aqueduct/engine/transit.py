"""The way of an attached channel to the peer: pending, then accessible or lost.

A channel becomes accessible when its message is acked on an accessible channel, and is lost when that message is nacked
or its carrying channel is lost. Section 3.6 of the document is empty; docs/conformance.md has this reading of it.
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
    """The fate of one channel, as a node of a tree.

    A channel whose message was acked on a pending channel is a child of that channel's node. The node of a channel that
    has ended stays only while it joins two or more others, so the tree is no larger than the number of live channels.
    """

    __slots__ = ("alive", "channel", "children", "fate", "ours", "parent")

    def __init__(self, channel: int | None, *, ours: bool, fate: Fate = Fate.PENDING) -> None:
        self.channel = channel
        self.ours = ours
        self.fate = fate
        self.alive = True
        self.parent: Transit | None = None
        self.children: dict[Transit, None] = {}

    def carried_by(self, carrier: Transit) -> list[Transit]:
        """Record that the message with this attachment arrived on `carrier`; give nodes of ours that are lost."""
        if self.fate is not Fate.PENDING or self.parent is not None or self is carrier:
            return []
        if carrier.fate is Fate.ACCESSIBLE:
            self._arrive()
        elif carrier.fate is Fate.LOST:
            return lose([self])
        else:
            self.parent = carrier
            carrier.children[self] = None
            self._prune()
        return []

    def ended(self) -> None:
        """Record that the channel has ended."""
        self.alive = False
        self._prune()

    def _arrive(self) -> None:
        pending = [self]
        while pending:
            node = pending.pop()
            node.fate, node.parent = Fate.ACCESSIBLE, None
            pending += node.children
            node.children.clear()

    def _prune(self) -> None:
        node = self
        while not node.alive and (parent := node.parent) is not None and len(node.children) <= 1:
            del parent.children[node]
            node.parent = None
            if node.children:
                (child,) = node.children
                node.children.clear()
                child.parent = parent
                parent.children[child] = None
                return
            node = parent


def lose(nodes: Iterable[Transit]) -> list[Transit]:
    """Mark channels as lost, with all that was sent on them; give the nodes of ours among these.

    A child that the peer made is left to the peer, which forgets it by itself.
    """
    lost, doomed = [], [*nodes]
    for node in doomed:  # grows while it is read
        if node.fate is not Fate.PENDING:
            continue
        if node.parent is not None:
            node.parent.children.pop(node, None)
            node.parent = None
        children = [*node.children]
        for child in children:
            child.parent = None
        node.children.clear()
        node.fate = Fate.LOST
        if node.ours:
            lost.append(node)
        doomed += [child for child in children if child.ours]
    return lost
