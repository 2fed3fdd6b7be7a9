"""Finds out which of the channels that are sent inside messages have reached the other side.

In Aqueduct, the side that creates a channel keeps one half of it. It sends the other half to its peer inside a message,
as an *attachment*. The channel on which this message travels is the *carrier*. The new channel is

- *accessible* once its message has arrived (it was acked) and the carrier is accessible,
- *lost* if its message didn't arrive (it was nacked), or if the carrier is lost, and
- *pending* until we know.

A channel can be lost although its message was acked, because acks may come in any order. Suppose that we attach channel
A to a message, and channel B to a message on A. The peer may ack the message with B first. Then B shares the fate of A,
which is still pending. If A turns out to be lost, the peer can never use A, so it can never use B either.

We represent each attached channel by a `Transit`. In the example, the ack makes B's `Transit` a child of A's. So the
pending channels form trees, and the fate of a node is also the fate of its descendants. If a channel ends while it is
pending, we remove its node, and its child takes its position. Only a node with several children stays.

`State` creates the nodes and calls their methods. It ends the channels that are lost, and notifies the peer with
FORGET_CHANNEL. The section of the Aqueduct specification about lost channels (3.6) is empty. Our interpretation is rule
aqueduct-X01 in docs/conformance.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import attrs


class Fate(Enum):
    """Whether a channel has reached the other side."""

    PENDING = "pending"
    """It isn't known yet."""
    ACCESSIBLE = "accessible"
    """The channel has reached the other side."""
    LOST = "lost"
    """The channel will never reach the other side."""


@attrs.define(eq=False)
class Transit:
    """What we know about one attached channel. It is a node in a tree of pending channels."""

    channel: int | None
    """The id of the channel, or None while it isn't attached to a message."""
    ours: bool
    """True if this side has created the channel."""
    fate: Fate = Fate.PENDING
    alive: bool = True
    """False once the channel has ended."""
    parent: Transit | None = None
    """The carrier, if the message with this channel was acked while the carrier was pending."""
    children: dict[Transit, None] = attrs.Factory(dict)
    """The channels of which this node is the parent. The dict serves as an ordered set."""

    def carried_by(self, carrier: Transit) -> list[Transit]:
        """Record that the message with this channel has arrived on `carrier`.

        Returns:
            The channels that are known to be lost now, if this side has created them. The caller must end them.
        """
        # A channel that was attached to a message on itself stays pending.
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
        """Record that the channel has ended. Its node may have to stay in the tree for the sake of its children."""
        self.alive = False
        self._prune()

    def _arrive(self) -> None:
        """Mark this channel and its descendants as accessible, and dissolve the tree."""
        pending = [self]
        while pending:
            node = pending.pop()
            node.fate, node.parent = Fate.ACCESSIBLE, None
            pending += node.children
            node.children.clear()

    def _prune(self) -> None:
        """Remove this node if its channel has ended, and then its ancestors that have become unnecessary.

        A node is unnecessary if its channel has ended and it has no child, or only one. The child takes its position.
        The root of a tree stays, because the message that carries it is still unanswered.
        """
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
    """Mark channels as lost, and with them their descendants that this side has created.

    The peer finds out for itself that its own channels are lost, and discards them with FORGET_CHANNEL. So we remove
    them from the tree, but don't mark them.

    Returns:
        The lost channels that this side has created. The caller must end them.
    """
    lost, doomed = [], [*nodes]
    for node in doomed:  # the loop appends the children of lost nodes to the list
        if node.fate is not Fate.PENDING:
            continue
        if (parent := node.parent) is not None:
            parent.children.pop(node, None)
            node.parent = None
            parent._prune()  # its channel may have ended, and it stayed only because it had two children
        children = [*node.children]
        for child in children:
            child.parent = None
        node.children.clear()
        node.fate = Fate.LOST
        if node.ours:
            lost.append(node)
        doomed += [child for child in children if child.ours]
    return lost
