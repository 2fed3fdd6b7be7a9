"""The errors of links and their channels."""

from __future__ import annotations

from muxkit._errors import MuxError
from muxkit.protocols.relink.engine.events import EpochChanged, LinkReplaced
from muxkit.runtime import ChannelCancelled, ChannelStopped, LinkLost


class LinkChanged(LinkLost):
    """The listener no longer has our link: everything that was under way on it is gone.

    `change` is the engine's event, with both epochs and link ids; `lost` counts messages of ours that were not
    answered, so their fate is unknown. The session itself goes on with the new link, unless there is
    none (`change.link_id` is 0, which only happens with `Config(require_link=True)`).
    """

    def __init__(self, change: LinkReplaced, *, peer: str = "") -> None:
        why = "it is another instance" if isinstance(change, EpochChanged) else "it does not know the old one"
        what = (
            f"the listener has another link for us, since {why}"
            if change.link_id
            else "the listener has no link for us"
        )
        super().__init__(f"{what}; {change.lost} messages were not answered", by="peer", peer=peer)
        self.change = change
        self.lost = change.lost


class LinkRefused(LinkLost):
    """The peer ended one connection after another as soon as the link went on over it, so the link was given up.

    Neither side got anything done on the last `connections` connections, each of which was over within a second. The
    protocol has no word for a refusal: the peer's log may have the reason. The cause is the loss of the last one.
    """

    def __init__(self, connections: int, last: BaseException, *, peer: str = "", unsent: int = 0) -> None:
        what = f"{connections} connections in a row were ended at once and brought nothing forward: the peer may refuse"
        super().__init__(f"{what} to go on with the link; the last one: {last}", by="peer", peer=peer, unsent=unsent)
        self.connections = connections
        self.__cause__ = last


class NotCommitted(MuxError):
    """The peer could not process a message that was committed: it answered `uncommitted`."""

    def __init__(self, channel: int, number: int) -> None:
        super().__init__(f"channel {channel}: the peer answered message {number} with uncommitted")
        self.channel = channel
        self.number = number


class RolledBackError(MuxError):
    """The message was rolled back on our side, so there is no answer to it."""

    def __init__(self, channel: int, number: int) -> None:
        super().__init__(f"channel {channel}: message {number} was rolled back")
        self.channel = channel
        self.number = number


# Of the common channels


def cancelled() -> Exception:
    return ChannelCancelled("the peer gave up on this channel before it was done")


def stopped() -> Exception:
    return ChannelStopped("the peer does not receive on this channel any more")


def refused() -> Exception:
    return ChannelStopped("the peer takes no new channels")
