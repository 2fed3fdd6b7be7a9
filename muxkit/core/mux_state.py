"""What the halves of all channels of one engine share, for protocols with credit in bytes for each channel.

A protocol's state derives from `MuxState` and adds its tables and what its frames need. `CreditSender`,
`WindowReceiver` and `StreamMuxEngine` work with what is declared here. yamux uses these four, and so does the worked
example of docs/how-to/protocol.md. bpmux has a state of its own, because its halves are entities that also pay for
openings with credit of the top level. e3x, Aqueduct and Relink count packets, streams and messages.
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

    KEEPALIVE = "keepalive"  # send a ping, because nothing was received
    ANSWER = "answer"  # end the connection, because nothing was received after that ping
    STALL = "stall"  # check that a frame that was begun made progress
    CHANNELS = "channels"  # look at the channels that wait for something


class MuxState:
    """The clock, the events, the queues and the budgets of one connection."""

    def __init__(self, limits: Limits, observer: Observer | None, *, floor: int, first: int) -> None:
        self.limits: Limits = limits
        self.observer: Observer | None = observer
        self.now: float = 0.0
        """The time of the last call that told it."""
        self.events: list[Any] = []
        """What happened since the events were taken the last time; always the same list."""
        self.deadlines: Deadlines[Vital] = Deadlines()
        self.outbox: Outbox = Outbox()
        self.scheduler: Scheduler = Scheduler()
        self.budget: ReceiveBudget = ReceiveBudget(limits.connection_bytes, floor, first)
        self.reassembly: Reassembly[Any] = Reassembly(limits.reassembly)  # its borrowers are receivers
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        self.held: int = 0
        """Bytes of all channels that have come and that the application hasn't consumed."""
        self.messages_sent: int = 0

    @property
    def overdraft(self) -> int:
        """How many bytes wait for the application beyond the windows that `Limits` allow all channels together.

        It is above 0 only in a protocol whose document gives channels credit that nobody has granted.
        """
        lent = self.limits.reassembly - self.reassembly.left
        return self.held - self.limits.connection_bytes - lent

    def take_events(self) -> list[Any]:
        """Return the events since the last call, oldest first."""
        events = self.events[:]
        self.events.clear()
        return events
