"""What is due when? Acks and counts that wait for more of their kind, reports on datagrams, and strays."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import Deadlines
from muxkit.protocols.aqueduct._events import Outcome
from muxkit.protocols.aqueduct._receiving import ReceiverMachine

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.protocols.aqueduct._channels import Channels, Half


class Timer(Enum):
    FLUSH = "flush"
    """When to tell of datagrams sent, and to ack what came in streams."""
    REPORT = "report"
    """When to ack or nack datagrams."""
    STRAY = "stray"
    """When to drop a receiver that only datagrams have spoken of."""
    HANDSHAKE = "handshake"
    """When the connection headers of the peer must have come."""
    STALL = "stall"
    """When more of an unfinished frame must have come."""


class Timers:
    """The deadlines of one connection and what happens at them."""

    def __init__(self, channels: Channels) -> None:
        self.deadlines: Deadlines[Timer] = Deadlines()
        self._channels = channels
        self.on_stall: Callable[[], None] = lambda: None
        self._flushing: dict[Half, None] = {}
        self._reports: list[tuple[float, int, ReceiverMachine]] = []
        self._order = count()
        # A late datagram may bring a channel back that is long over, and nobody would ever end it.
        self._strays: OrderedDict[ReceiverMachine, float] = OrderedDict()

    def handle(self, now: float) -> None:
        for timer in self.deadlines.expired(now):
            if self._channels.observer is not None:
                self._channels.observer.timer(timer.value)
            match timer:
                case Timer.FLUSH:
                    self._flush()
                case Timer.REPORT:
                    self._report(now)
                case Timer.STRAY:
                    self._drop_strays(now)
                case Timer.STALL:
                    self.on_stall()
                case Timer.HANDSHAKE:
                    seconds = self._channels.limits.handshake
                    raise RemoteProtocolError(f"no connection headers after {seconds} s", limit="handshake")

    def forget(self, half: Half) -> None:
        """It is gone."""
        self._flushing.pop(half, None)
        self.confirm(half)

    # --- acks and counts

    def flush_soon(self, half: Half) -> None:
        self._flushing.setdefault(half)
        if Timer.FLUSH not in self.deadlines:
            self.deadlines.set(Timer.FLUSH, self._channels.now + self._channels.config.flush_delay)

    def _flush(self) -> None:
        flushing, self._flushing = self._flushing, {}
        for half in flushing:
            half.flush = True
            self._channels.line.add(half.stream())

    # --- reports

    def report_at(self, due: float, receiver: ReceiverMachine) -> None:
        """Once for each receiver: when it is due, or was before more was learned, it is asked for its next time."""
        heapq.heappush(self._reports, (due, next(self._order), receiver))
        self.deadlines.set(Timer.REPORT, self._reports[0][0])

    def _report(self, now: float) -> None:
        while self._reports and self._reports[0][0] <= now:
            _, _, receiver = heapq.heappop(self._reports)
            if receiver.gone:
                continue
            is_due = receiver.report_due(now)
            if receiver.next_report is not None:
                heapq.heappush(self._reports, (receiver.next_report, next(self._order), receiver))
            if not is_due:
                continue
            if receiver.is_complete:
                self._channels.close(receiver, Outcome.FINISHED)
            else:
                self._channels.line.add(receiver.stream())
        if self._reports:
            self.deadlines.set(Timer.REPORT, self._reports[0][0])

    # --- strays

    def stray(self, receiver: ReceiverMachine) -> None:
        self._strays[receiver] = self._channels.now + self._channels.receipt_deadline
        if Timer.STRAY not in self.deadlines:
            self.deadlines.set(Timer.STRAY, self._strays[receiver])

    def confirm(self, half: Half) -> None:
        """A stream has spoken of it."""
        if self._strays and isinstance(half, ReceiverMachine):
            self._strays.pop(half, None)

    def _drop_strays(self, now: float) -> None:
        while self._strays:
            receiver, due = next(iter(self._strays.items()))
            if due > now:
                self.deadlines.set(Timer.STRAY, due)
                return
            del self._strays[receiver]
            # Not buried: should the channel be alive after all, its streams must find a new machine.
            self._channels.end(receiver, Outcome.FORGOTTEN, bury=False)
