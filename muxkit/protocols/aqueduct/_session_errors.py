"""How does a half end, while its connection lives? Each way has an error of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from muxkit._errors import MuxError
from muxkit.protocols.aqueduct._events import Outcome
from muxkit.runtime import ChannelCancelled, ChannelStopped

if TYPE_CHECKING:
    from collections.abc import Callable

    ErrorMaker = Callable[[], Exception]


class Finished(MuxError, trio.EndOfChannel):
    """The clean end: the sender finished, and everything that it sent was received."""


class Cancelled(ChannelCancelled):
    """The sender gave up; messages may be missing."""


class NoReceiver(ChannelStopped):
    """The receiver was closed: nobody will read what is sent, and perhaps not what was sent."""


class LostInTransit(MuxError, trio.BrokenResourceError):
    """The message that carried the other half did not arrive, so the channel has only one end.

    The side that made the channel finds out and tells the other, should it know of the channel after all.
    """


def finished() -> Exception:
    return Finished("the sender finished, and everything was received")


def closed() -> Exception:
    return trio.ClosedResourceError("this half was closed on our side")


def refused() -> Exception:
    return ChannelStopped("no channel can be opened any more: the peer is closing the connection")


ERRORS: Final[dict[Outcome, ErrorMaker]] = {
    Outcome.FINISHED: finished,
    Outcome.CANCELLED: lambda: Cancelled("the sender gave up before it was done"),
    Outcome.NO_RECEIVER: lambda: NoReceiver("the receiver was closed"),
    Outcome.LOST_IN_TRANSIT: lambda: LostInTransit("the message that carried the other half did not arrive"),
    Outcome.FORGOTTEN: lambda: LostInTransit("the peer, who made this channel, has let go of it"),
}
