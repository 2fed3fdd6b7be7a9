"""How attached channels get to the peer: a tree of the channels whose arrival isn't certain yet.

A channel travels as an attachment of a message. It becomes accessible when that message is acked on a channel that is
accessible itself, and it is lost when the message is nacked or the channel that carries it is lost. Section 3.6 of the
document, which should say this, is empty; docs/conformance.md has our reading of it.

A channel whose message was acked on a channel that is still pending becomes a child of that channel's node. The node of
a channel that has ended stays in the tree only while it joins two or more others. So the tree never has more nodes
than there are live channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import attrs


class Fate(Enum):
    """What is known about the way of a channel to the peer."""

    PENDING = "pending"
    ACCESSIBLE = "accessible"
    LOST = "lost"


@attrs.define(eq=False)
class Transit:
    """The way of one attached channel to the peer, as a node of the tree."""

    channel: int | None
    ours: bool
    fate: Fate = Fate.PENDING
    alive: bool = True
    parent: Transit | None = None
    children: dict[Transit, None] = attrs.Factory(dict)

    def carried_by(self, carrier: Transit) -> list[Transit]:
        """Record that the message with this attachment arrived on `carrier`; return our nodes that are lost by that."""
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
    """Mark channels as lost, with all channels that were sent on them; return our nodes among these.

    A child that the peer made is left to the peer, which discards it on its own.
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
