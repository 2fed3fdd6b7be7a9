"""The state of a connection, for engines with many channels over one byte stream and with credit in bytes.

Each half of a channel needs some objects that all halves of the connection share: the limits, the queues for writing,
the budgets for receiving, the list of events. They are attributes of a `MuxState`. A protocol derives its own state
from it and adds its channels.

`StreamMuxEngine`, `CreditSender` and `WindowReceiver` work with a `MuxState`. Together, they are a toolkit for new
protocols: yamux and the example in docs/how-to/protocol.md use all of it. bpmux uses only `MuxState` and
`StreamMuxEngine`, because its halves follow other rules. Relink, Aqueduct and e3x have states of their own, because
they don't count credit in bytes of a channel, or because their channels outlive a connection.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core._liveness import Deadlines
from muxkit.core._queues import Outbox, Scheduler
from muxkit.core._windows import Reassembly, StartPace
from muxkit.core.receive_windows import ReceiveBudget


class Vital(Enum):
    """The timers of a connection."""

    KEEPALIVE = "keepalive"
    """Send a ping, because nothing has been received for some time."""
    ANSWER = "answer"
    """End the connection, because nothing has been received after that ping."""
    STALL = "stall"
    """Check that an incomplete message makes progress."""
    CHANNELS = "channels"
    """Handle the channels whose waiting time is over."""


class MuxState:
    """The state that all halves of one connection share.

    Args:
        limits: The limits of the connection.
        observer: Receives notifications about the connection.
        floor: How many bytes each channel's window may have in any case.
        first: How many bytes the window of a new channel has.
    """

    def __init__(self, limits: Limits, observer: Observer | None, *, floor: int, first: int) -> None:
        self.limits: Limits = limits
        self.observer: Observer | None = observer
        self.now: float = 0.0
        """The time that was passed to the last call."""
        self.over: bool = False
        """True once the connection has ended. Then nothing is sent, and received bytes are ignored."""
        self.events: list[Any] = []
        """The events that haven't been reported."""
        self.deadlines: Deadlines[Vital] = Deadlines()
        self.outbox: Outbox = Outbox()
        self.scheduler: Scheduler = Scheduler()
        self.budget: ReceiveBudget = ReceiveBudget(limits.connection_bytes, floor, first)
        self.reassembly: Reassembly[Any] = Reassembly(limits.reassembly)
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        self.unfinished: int = 0
        """The number of incomplete messages in several frames, without those that the application doesn't want."""
        self.held: int = 0
        """The number of bytes that the application hasn't consumed, for all `WindowReceiver`s together."""
        self.messages_sent: int = 0

    @property
    def overdraft(self) -> int:
        """By how many bytes the unconsumed bytes of all channels exceed `Limits.connection_bytes` and the loans.

        It can only be positive in protocols like yamux, where every new channel has credit that this side hasn't
        granted.
        """
        lent = self.limits.reassembly - self.reassembly.left
        return self.held - self.limits.connection_bytes - lent
