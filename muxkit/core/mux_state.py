"""What the halves of all channels of one engine share, for protocols with credit in bytes for each channel.

A protocol's state derives from `MuxState` and adds its tables and what its frames need. `StreamMuxEngine`,
`CreditSender` and `WindowReceiver` work with what is declared here. bpmux, yamux and the worked example of
docs/how-to/protocol.md derive their state and their engine from `MuxState` and `StreamMuxEngine`.

yamux and the example also derive their halves from `CreditSender` and `WindowReceiver`. Those of bpmux are entities of
its document, which pay for openings with credit of the top level, end with a payload, and are pinged one by one.
Relink, Aqueduct and e3x count messages, streams and packets, or resume, so their state and halves are their own.
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
        self.over: bool = False
        """True once the connection is over: nothing is sent, and what comes is ignored."""
        self.events: list[Any] = []
        """What happened since the events were taken the last time."""
        self.deadlines: Deadlines[Vital] = Deadlines()
        self.outbox: Outbox = Outbox()
        self.scheduler: Scheduler = Scheduler()
        self.budget: ReceiveBudget = ReceiveBudget(limits.connection_bytes, floor, first)
        self.reassembly: Reassembly[Any] = Reassembly(limits.reassembly)  # its borrowers are receivers
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        self.unfinished: int = 0
        """Messages of several frames that the application wants, and that have begun and aren't complete."""
        self.held: int = 0
        """Bytes that each `WindowReceiver` has received and that the application hasn't consumed."""
        self.messages_sent: int = 0

    @property
    def overdraft(self) -> int:
        """How many bytes wait for the application beyond the windows that `Limits` allow all channels together.

        It is above 0 only in a protocol whose document gives channels credit that nobody has granted.
        """
        lent = self.limits.reassembly - self.reassembly.left
        return self.held - self.limits.connection_bytes - lent
